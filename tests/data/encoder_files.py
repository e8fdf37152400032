"""Encoders of the published architectures with random weights, saved in the published formats.

Cosmos-0.1-Tokenizer-CV4x8x8 is diffusers' `AutoencoderKLCosmos` at a reduced width. It was compared by reading with
NVIDIA's Cosmos-Tokenizer (`networks/configs.py` and `continuous_video.py`, `modules/layers3d.py`, `patching.py`,
`utils.py`, `distributions.py`) as `video_cli.py` builds CV4x8x8: spatial compression 8, temporal compression 4.

- Equal: Haar patches of 4x4x4 with the first frame repeated; factorized causal convolutions; norms of one group, frame
  by frame; widths of (1, 2, 4, 4) x 128 down and (4, 4, 2) x 128 up; sides halved once, time never; spatial, then
  causal temporal attention, in the middle only. With one set of weights both gave the same to 1e-5 of values of size 1.
- Different: NVIDIA's modules hold unused convolutions of resamplings, and compute attention in single steps.
- `encoder_jit()` returns (latent, posterior), the posterior two zeros. It cannot be scripted (`Patcher3D.range`), so a
  file is a trace. NeMo DFM gives it bfloat16 and casts nothing, so the published one is a bfloat16 trace.
"""

import contextlib
import copy
import functools
import json
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import nn

NAMES = ("Aholibah Underwing", "Grass Jewel", "Lilac-bordered Copper", "Blue Morpho", "Monarch", "Painted Lady")


class CosmosEncoder(nn.Module):
    """The published signature: video -> (latent, posterior)."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        return self.network._encode(x), (torch.tensor([0.0]), torch.tensor([0.0]))


class CosmosDecoder(nn.Module):
    """The published signature: latent -> video."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.network._decode(z, return_dict=False)[0]


@functools.cache
def cosmos() -> tuple[CosmosEncoder, CosmosDecoder]:
    """CV4x8x8; the published width is 128."""
    from diffusers import AutoencoderKLCosmos

    torch.manual_seed(0)
    network = AutoencoderKLCosmos(
        encoder_block_out_channels=(4, 8, 16, 16),
        decode_block_out_channels=(8, 16, 16),
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )
    network.requires_grad_(False).eval()
    return CosmosEncoder(network), CosmosDecoder(network)


def _pool_in_float32(x, kernel, stride=(), padding=0, ceil_mode=False, count_include_pad=True, divisor=None):
    """avg_pool3d of frames in blocks of 2x2; torch has it for half precision on CUDA only."""
    assert list(kernel) == list(stride) == [1, 2, 2]
    return x.float().unfold(3, 2, 2).unfold(4, 2, 2).mean((-1, -2)).to(x.dtype)


@contextlib.contextmanager
def _half_precision_pooling():
    """What a half-precision trace on CPU needs while it is made."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("avg_pool3d", _pool_in_float32, "CPU")
    try:
        yield
    finally:
        library._destroy()


def save_cosmos(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """encoder.jit and decoder.jit, traced in `dtype`, which a trace holds as numbers in its code."""
    folder.mkdir(parents=True, exist_ok=True)
    examples = (torch.zeros(1, 3, 9, 64, 64), torch.zeros(1, 16, 3, 8, 8))
    half = dtype in (torch.bfloat16, torch.float16)
    with warnings.catch_warnings(action="ignore"), _half_precision_pooling() if half else contextlib.nullcontext():
        for name, network, example in zip(("encoder", "decoder"), cosmos(), examples):
            trace = torch.jit.trace(copy.deepcopy(network).to(dtype), example.to(dtype), check_trace=False)
            trace.save(str(folder / f"{name}.jit"))
    return folder


def save_t5(folder: Path, d_model: int = 1024, seed: int = 0) -> Path:
    """A T5 saved whole (encoder, decoder, shared embedding) with few layers, and a unigram tokenizer of captions."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import T5Config, T5ForConditionalGeneration, T5TokenizerFast

    colours, kinds, places = ("blue", "red", "white"), ("butterfly", "morpho", "monarch"), ("meadow", "leaf", "forest")
    captions = [f"a {c} {k} over a {p}, wings spread" for c in colours for k in kinds for p in places]
    pieces = Tokenizer(models.Unigram())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False)
    pieces.train_from_iterator(captions, trainer)
    vocab = [(piece, score) for piece, score in json.loads(pieces.to_str())["model"]["vocab"]]
    tokenizer = T5TokenizerFast(vocab=vocab)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    shape = {"d_model": d_model, "d_kv": 32, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 4}
    config = T5Config(vocab_size=len(tokenizer), **shape)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def save_butterflies(folder: Path) -> None:
    """The Smithsonian's, in the format that the hub has them in."""
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (len(NAMES), 9, 9, 3), dtype=np.uint8)
    files = [folder / f"{i}.jpg" for i in range(len(NAMES))]
    for i, file in enumerate(files):
        Image.fromarray(pixels[i]).resize([(640, 530), (520, 700), (512, 512)][i % 3]).save(file)
    table = pa.table({"image_url": [f.as_uri() for f in files], "name": NAMES, "scientific_name": NAMES})
    pq.write_table(table, folder / "train-00000-of-00001.parquet")
