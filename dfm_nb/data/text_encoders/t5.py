"""`t5`: token states of a T5 encoder in bfloat16; google-t5/t5-11b by default, any other by hub id or folder.

Only the encoder half is loaded. Batches are of similar length and padding is masked, so a caption's states do not
depend on its batch (to rounding). With `accelerate` installed, what does not fit the process's own GPU is kept in host
memory; other GPUs are left alone, as every process of a preparation has its own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from dfm_nb.base.files import weights_sha256
from dfm_nb.base.log import log

PATH_FLAG = "--t5-cache-dir"
DEFAULT = "google-t5/t5-11b"
BATCH_TOKENS = 4096  # padded tokens of a batch


class T5:
    """See the module. folder : a local folder or a hub id. weights, words : sub-folders of it, "" for itself."""

    name = "t5"
    network = "T5EncoderModel"  # of transformers
    flag = PATH_FLAG

    def __init__(
        self, folder: str, cache_dir: str | None, device: str, max_tokens: int, weights: str = "", words: str = ""
    ):
        import transformers
        from transformers.utils import cached_file, logging

        logging.disable_progress_bar()
        self.folder, self.device, self.max_tokens = folder, device, max_tokens
        placement, Network = _placement(device), getattr(transformers, self.network)
        where: dict[str, Any] = {"cache_dir": cache_dir, "subfolder": weights}
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, cache_dir=cache_dir, subfolder=words)
            model: Any = Network.from_pretrained(folder, dtype=torch.bfloat16, **where, **placement)
            config = Path(str(cached_file(folder, "config.json", **where)))
        except OSError as error:
            there = f" in {cache_dir}" if cache_dir else ""
            raise FileNotFoundError(
                f"the {self.name.upper()} encoder {folder} cannot be had{there} ({str(error).splitlines()[0]}); "
                f"fetch it where there is a network with `hf download {folder}`, "
                f"and pass its folder or cache with {self.flag}"
            ) from None
        self.model = (model if placement else model.to(device)).eval()
        self.dim = self.model.config.d_model
        beside = config.parent
        files = sorted(beside.glob("model*.safetensors")) or sorted(beside.glob("pytorch_model*.bin"))
        self.sha256 = weights_sha256(config, files)

    @torch.no_grad()
    def encode(self, captions: list[str]) -> list[torch.Tensor]:
        """bfloat16 [L, D] per caption, in the order given."""
        distinct = sorted(set(captions))
        ids = self.tokenizer(distinct, truncation=True, max_length=self.max_tokens)["input_ids"] if distinct else []
        order = sorted(range(len(distinct)), key=lambda i: (len(ids[i]), distinct[i]))
        states: dict[str, torch.Tensor] = {}
        while order:
            longest = len(ids[order[-1]])
            rows = max(1, BATCH_TOKENS // max(longest, 1))
            batch, order = order[-rows:], order[:-rows]
            padded = torch.full((len(batch), longest), self.tokenizer.pad_token_id or 0)
            mask = torch.zeros_like(padded)
            for row, i in enumerate(batch):
                padded[row, : len(ids[i])], mask[row, : len(ids[i])] = torch.tensor(ids[i]), 1
            hidden = self.model(
                input_ids=padded.to(self.model.device), attention_mask=mask.to(self.model.device)
            ).last_hidden_state
            for row, i in enumerate(batch):
                states[distinct[i]] = hidden[row, : len(ids[i])].bfloat16().cpu().clone()
        return [states[c] for c in captions]

    def identity(self) -> dict:
        version = getattr(self.model.config, "_commit_hash", None) or Path(self.folder).name
        return {
            "name": self.name,
            "version": f"{Path(self.folder).name}@{version}",
            "sha256": self.sha256,
            "dim": self.dim,
            "max_tokens": self.max_tokens,
        }


def _placement(device: str) -> dict:
    """Where the weights go: empty for the device as a whole; with accelerate, this GPU first and then host memory."""
    if not device.startswith("cuda") or importlib.util.find_spec("accelerate") is None:
        return {}
    import psutil

    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    free, _ = torch.cuda.mem_get_info(index)
    room = {index: int(0.8 * free), "cpu": psutil.virtual_memory().available // 2}
    return {"device_map": "auto", "max_memory": room}


def build(path: str | Path | None = None, device: str = "cpu", max_tokens: int = 512) -> T5:
    """Load the encoder.

    Parameters
    ----------
    path : a folder with config.json, a hub id `org/name`, or a cache folder of `google-t5/t5-11b`, which is made when
        it is not there; None: the hub's default cache.
    max_tokens : longer captions are cut.
    """
    return T5(*place_of(path, DEFAULT), device, max_tokens)


def place_of(path: str | Path | None, default: str) -> tuple[str, str | None]:
    """(folder or hub id, cache folder) of what a user names: a folder with config.json, a hub id, or a cache folder."""
    if path is None:
        return default, None
    place = Path(path).expanduser()
    if (place / "config.json").is_file():
        return str(place), None
    if not place.is_dir():
        if str(path).count("/") == 1 and not place.parent.is_dir():  # `./name` and `folder/name` are no hub ids
            return str(path), None
        log.info("%s is a new cache folder, for %s", place, default)
    return default, str(place)
