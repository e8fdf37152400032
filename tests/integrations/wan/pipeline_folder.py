"""A small Wan as diffusers saves its pipeline, with random weights."""

import shutil
from pathlib import Path

import torch

from tests.data import encoder_files
from tests.integrations.wan.reference import random_network


def save_wan(folder: Path) -> Path:
    """All parts; the transformer in several files."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
    from transformers import AutoTokenizer, UMT5EncoderModel

    parts = folder / "parts"
    save_wan_vae(parts)
    save_umt5(parts)
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


def save_wan_vae(folder: Path) -> Path:
    """Wan 2.1's autoencoder at a twelfth of its width, in vae/ as in the published folder."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    AutoencoderKLWan(base_dim=8, num_res_blocks=1).save_pretrained(folder / "vae")
    return folder


def save_umt5(folder: Path) -> Path:
    """A small UMT5 encoder and its tokenizer: both in alone/; in wan/ as in Wan's published folder."""
    from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

    words = AutoTokenizer.from_pretrained(encoder_files.save_t5(folder / "t5", 64))
    torch.manual_seed(3)
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    network = UMT5EncoderModel(UMT5Config(vocab_size=len(words), **shape))
    for weights, pieces in (("alone", "alone"), ("wan/text_encoder", "wan/tokenizer")):
        network.save_pretrained(folder / weights)
        words.save_pretrained(folder / pieces)
    shutil.rmtree(folder / "t5")
    return folder
