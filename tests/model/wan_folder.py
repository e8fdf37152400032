"""A small Wan as diffusers saves its pipeline, with random weights."""

from pathlib import Path

from tests.data import encoder_files
from tests.model.wan import random_network


def save_wan(folder: Path) -> Path:
    """All parts; the transformer in several files."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
    from transformers import AutoTokenizer, UMT5EncoderModel

    parts = folder / "parts"
    encoder_files.save_wan_vae(parts)
    encoder_files.save_umt5(parts)
    pipeline = WanPipeline(
        transformer=random_network(text_dim=64),
        vae=AutoencoderKLWan.from_pretrained(parts / "vae"),
        text_encoder=UMT5EncoderModel.from_pretrained(parts / "wan" / "text_encoder"),
        tokenizer=AutoTokenizer.from_pretrained(parts / "wan" / "tokenizer"),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )
    pipeline.save_pretrained(folder, max_shard_size="150KB")
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 2
    return folder
