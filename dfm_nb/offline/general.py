"""`general`: the network of `residual`, trained on pictures of all kinds, encoder too.

3.8 M parameters, 7.6 MB as float16. Its blocks are wider on the grids of 1/8 and 1/4, and it has none on that of 1/2:
an 8x8 block of a step of time costs 8 M multiply-adds. Pictures, licences and figures: benchmarks/results/tokenizer.md.
"""

from pathlib import Path

from dfm_nb.offline import residual

CARRIED = True
tune = residual.tune
ASSET = Path(__file__).with_suffix(".safetensors")


def build(path: str | Path | None = None, device: str = "cpu") -> residual.ResidualTokenizer:
    """The tokenizer of `path` (see `residual.build`); None for the one that comes with the package."""
    return residual.build(ASSET if path is None else path, device)
