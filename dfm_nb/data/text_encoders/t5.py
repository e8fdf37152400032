"""`t5`: token states of a T5 encoder in bfloat16; google-t5/t5-11b by default, any other by hub id or folder.

Only the encoder half is loaded. With `accelerate` installed, what does not fit the process's own GPU is kept in host
memory; other GPUs are not used, as every process of a preparation has its own.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch

from dfm_nb.base.files import weights_sha256
from dfm_nb.base.hub import tokenizer_of
from dfm_nb.base.log import log

BATCH_TOKENS = 4096  # at most in a batch, padding included


class Words:
    """What the text encoders share.

    tokenizer, model : of transformers. max_tokens : longer captions are cut. rows : captions of a batch.
    """

    tokenizer: Any
    model: Any
    max_tokens: int
    rows: int

    def clean(self, caption: str) -> str:
        """What is read of a caption."""
        return caption

    def lost(self, caption: str) -> dict[str, str]:
        """What the states of a caption lack, as a sentence by reason."""
        tokens = self.tokenizer(self.clean(caption), verbose=False)["input_ids"]
        lost = {}
        own = len(tokens) - self.tokenizer.num_special_tokens_to_add()
        unknown = tokens.count(self.tokenizer.unk_token_id)
        if len(tokens) > self.max_tokens:
            lost["text_cut"] = f"its text of {len(tokens)} tokens is cut at {self.max_tokens}; shorten it"
        if unknown:
            said = f"{unknown} of {own} tokens of its text are unknown to the text encoder; choose another"
            lost["unknown_text" if 2 * unknown > own else "unknown_tokens"] = said
        return lost

    @torch.no_grad()
    def encode(self, captions: list[str]) -> list[torch.Tensor]:
        """Last hidden states of each caption's own tokens, bfloat16 [L, D] on the CPU, in the order given.

        Equal captions are encoded once. Those with about equally many tokens share a batch, so little of it is padding.
        Padding is masked: a caption's states do not depend on its batch (to rounding).
        """
        captions = [self.clean(caption) for caption in captions]
        cut: dict[str, Any] = {"truncation": True, "max_length": self.max_tokens}
        distinct = sorted(set(captions), key=lambda c: (len(self.tokenizer(c, **cut)["input_ids"]), c))
        states = {}
        for start in range(0, len(distinct), self.rows):
            batch = distinct[start : start + self.rows]
            tokens = self.tokenizer(batch, padding=True, return_tensors="pt", **cut).to(self.model.device)
            hidden_BLD = self.model(**tokens).last_hidden_state
            for caption, hidden_LD, mask_L in zip(batch, hidden_BLD, tokens["attention_mask"]):
                states[caption] = hidden_LD[mask_L.bool()].bfloat16().cpu()
        return [states[c] for c in captions]


class T5(Words):
    """See the module.

    path : a local folder with config.json, one of diffusers' with text_encoder/ and tokenizer/, a hub id, a cache
        folder for `default`, or None.
    max_tokens : T5 has no limit of its own; a network with so many positions must lower it, as `minilm` does.
    """

    name, network = "t5", "T5EncoderModel"  # of transformers
    default = "google-t5/t5-11b"

    def __init__(self, path: str | Path | None = None, device: str = "cpu", max_tokens: int = 512):
        import transformers
        from transformers.utils import cached_file, extract_commit_hash, logging

        logging.disable_progress_bar()
        self.folder, cache_dir = place_of(path, self.default)
        self.max_tokens, self.rows = max_tokens, max(1, BATCH_TOKENS // max_tokens)
        placement, of_diffusers = _placement(device), (Path(self.folder) / "text_encoder" / "config.json").is_file()
        weights: dict[str, Any] = {"cache_dir": cache_dir, "subfolder": "text_encoder" if of_diffusers else ""}
        words = weights | {"subfolder": "tokenizer" if of_diffusers else ""}
        try:
            self.tokenizer = tokenizer_of(self.folder, **words)
            Network = getattr(transformers, self.network)
            how = {"trust_remote_code": False, "dtype": torch.bfloat16}
            model: Any = Network.from_pretrained(self.folder, **how, **weights, **placement)
            config = Path(str(cached_file(self.folder, "config.json", **weights)))
        except OSError as error:
            there = f" in {cache_dir}" if cache_dir else ""
            raise FileNotFoundError(
                f"the {self.name.upper()} encoder {self.folder} is missing{there} ({str(error).splitlines()[0]}); run "
                f"`hf download {self.folder}` with internet access, and pass its folder with --text-encoder-path"
            ) from None
        self.model = (model if placement else model.to(device)).eval()
        self.dim = self.model.config.d_model
        self.commit = extract_commit_hash(str(config), None)  # from the hub's cache
        files = sorted(config.parent.glob("model*.safetensors")) or sorted(config.parent.glob("pytorch_model*.bin"))
        self.sha256 = weights_sha256(config, files)

    def identity(self) -> dict:
        name = Path(self.folder).name
        own = {"name": self.name, "version": f"{name}@{self.commit or name}", "sha256": self.sha256}
        return own | {"dim": self.dim, "max_tokens": self.max_tokens}


def _placement(device: str) -> dict:
    """Where the weights go: empty for the device as a whole; with accelerate, this GPU first and then host memory."""
    if not device.startswith("cuda") or importlib.util.find_spec("accelerate") is None:
        return {}
    import psutil

    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    free, _ = torch.cuda.mem_get_info(index)
    # a fifth of the GPU is left for activations and the tokenizer of videos, half of the host for
    # other processes
    room = {index: int(0.8 * free), "cpu": psutil.virtual_memory().available // 2}
    return {"device_map": "auto", "max_memory": room}


def place_of(path: str | Path | None, default: str) -> tuple[str, str | None]:
    """(folder or hub id, cache folder) for a user's path: a folder with weights, a hub id, or a cache folder."""
    if path is None:
        return default, None
    place = Path(path).expanduser()
    if any((place / config).is_file() for config in ("config.json", "text_encoder/config.json")):
        return str(place), None
    if not place.is_dir():
        # `./name` and `folder/name` are no hub ids
        if str(path).count("/") == 1 and not place.parent.is_dir():
            return str(path), None
        log.info("%s is a new cache folder, for %s", place, default)
    return default, str(place)


build = T5
