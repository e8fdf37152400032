"""Hugging Face tokenizers for text corpora: loaded as Megatron loads them, sent to worker processes as text.

Enters: a hub id, a folder, or a tokenizer.json. Leaves: `TokenizerSpec`, plain data: vocabulary size, EOD id, a hash.
Guarantees: the ids are those of megatron.core's HuggingFaceTokenizer (no special tokens added; sep stands in for a
missing eos, cls for a missing bos). Cost: transformers is imported by `load` alone; a worker needs only `tokenizers`.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer as data. `vocab_size` counts added tokens; `max_id` is the largest id it can give."""

    name: str
    json: str
    vocab_size: int
    max_id: int
    eod_id: int | None
    eod_token: str | None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()

    def check_dtype(self, dtype: np.dtype) -> None:
        """Raise ValueError unless every id fits in `dtype`."""
        top = np.iinfo(dtype).max
        if self.max_id > top:
            raise ValueError(
                f"{dtype} holds token ids up to {top}; {self.name} gives ids up to {self.max_id}; use --dtype int32"
            )

    def require_eod(self) -> int:
        if self.eod_id is None:
            raise ValueError(
                f"--append-eod needs a tokenizer with an end-of-document (eos) token; {self.name} has none; set "
                "eos_token in its tokenizer_config.json, or leave --append-eod away"
            )
        return self.eod_id

    def backend(self):
        """The `tokenizers.Tokenizer`, with truncation and padding off."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def load(model: str | Path) -> TokenizerSpec:
    """Load a tokenizer by hub id, folder, or path of a tokenizer.json.

    Raises
    ------
    ValueError : it is not found (the text says how to get it), or it has no Rust ("fast") form
    """
    tokenizer = _from_transformers(str(model))
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(
            f"the tokenizer must have a tokenizer.json (a fast tokenizer); {model} has only a Python one; convert it "
            "with transformers.convert_slow_tokenizer and save it"
        )
    aliases: dict[str, str] = {}
    for a, b in (("sep_token", "eos_token"), ("bos_token", "cls_token")):
        for missing, given in ((a, b), (b, a)):
            if getattr(tokenizer, missing, None) is None and getattr(tokenizer, given, None):
                aliases[missing] = getattr(tokenizer, given)
    if aliases:
        tokenizer.add_special_tokens(aliases)
    eod = tokenizer.eos_token
    vocabulary = tokenizer.get_vocab()
    return TokenizerSpec(
        name=str(Path(model).resolve()) if os.path.exists(model) else str(model),
        json=tokenizer.backend_tokenizer.to_str(),
        vocab_size=len(tokenizer),
        max_id=max(vocabulary.values(), default=0),
        eod_id=None if eod is None else int(tokenizer.convert_tokens_to_ids(eod)),
        eod_token=None if eod is None else str(eod),
    )


def _from_transformers(model: str):
    local = os.path.exists(model)
    if local and os.path.isfile(model):
        from transformers import PreTrainedTokenizerFast

        folder = Path(model).parent
        if not (folder / "tokenizer_config.json").exists():
            return PreTrainedTokenizerFast(tokenizer_file=model, eos_token=_likely_eos(model))
        model = str(folder)
    if not local and (model.startswith(("/", ".", "~")) or model.count("/") > 1):
        raise ValueError(
            f"--tokenizer-model must be a hub id, a folder or a tokenizer.json; nothing is at {model}; get a tokenizer "
            f"with: {_how_to_get('MODEL', model)}"
        )
    if local and not any(Path(model).glob("*token*")) and not any(Path(model).glob("vocab*")):
        raise ValueError(
            f"--tokenizer-model must hold tokenizer.json or a vocabulary; {model} holds "
            f"{', '.join(sorted(os.listdir(model))[:5]) or 'nothing'}; get one with: {_how_to_get('MODEL', model)}"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=not local and not _hub_is_known())
    except Exception as error:
        why = str(error).strip().split("\n")[0]
        raise ValueError(
            f"tokenizer {model!r} was not found or could not be read ({why}); give a folder with tokenizer.json, or "
            f"get it with: {_how_to_get('MODEL' if local else model, 'DIR')} (some need hf auth login first)"
        ) from error


def _how_to_get(model: str, folder: str) -> str:
    return f"hf download {model} --include 'tokenizer*' --include 'special_tokens_map.json' --local-dir {folder}"


def _hub_is_known() -> bool:
    """False when the hub's name cannot be resolved here: then the client's minute of retries is spared."""
    import socket
    from urllib.parse import urlsplit

    from huggingface_hub import constants

    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _likely_eos(path: str) -> str | None:
    """A bare tokenizer.json does not say which token ends a text: take a well-known one among its added tokens."""
    import json

    added = {t["content"] for t in json.loads(Path(path).read_text(encoding="utf-8")).get("added_tokens", [])}
    for token in ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"):
        if token in added:
            return token
    return None
