"""A Wan of 0.2 M random parameters in the files of the published one, to follow every step without a download."""

from pathlib import Path

import torch


def save(folder: Path) -> Path:
    """Write all parts of the pipeline as diffusers does; needs `dfm_nb[wan]`."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
    from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel  # type: ignore[attr-defined]  # made at import

    torch.manual_seed(0)
    letters = [(letter, -1.0) for letter in "\u2581abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:"]
    words = T5TokenizerFast(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *letters])
    text = UMT5Config(vocab_size=len(words), d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    shape = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "ffn_dim": 128, "text_dim": 64}
    WanPipeline(
        transformer=WanTransformer3DModel(**shape),
        vae=AutoencoderKLWan(base_dim=8, num_res_blocks=1),
        text_encoder=UMT5EncoderModel(text),
        tokenizer=words,
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ).save_pretrained(folder)  # type: ignore[attr-defined]  # of a mixin without types
    return folder
