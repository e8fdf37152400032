"""Hugging Face tokenizers for text corpora: loaded as Megatron loads them, sent to worker processes as text.

The ids are those of megatron.core's HuggingFaceTokenizer: no special tokens are added, so no BOS either; sep replaces a
missing eos.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dfm_nb.base.hub import hub_is_known, tokenizer_of


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer as data. `vocab_size` includes added tokens; `max_id` is its largest id."""

    name: str
    description: str  # the whole tokenizer.json
    vocab_size: int
    max_id: int
    eod_id: int | None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.description.encode()).hexdigest()

    def check(self, dtype: np.dtype, append_eod: bool) -> None:
        """Raise ValueError unless every id fits in `dtype`, and there is an EOD token if one is needed."""
        top = np.iinfo(dtype).max
        if self.max_id > top:
            raise ValueError(f"{dtype} holds ids up to {top}; {self.name} has id {self.max_id}; use --dtype int32")
        if append_eod and self.eod_id is None:
            raise ValueError(f"--append-eod needs an eos_token in {self.name}/tokenizer_config.json, which has none")

    def backend(self) -> Tokenizer:
        """The tokenizer itself, with truncation and padding off."""
        tokenizer = Tokenizer.from_str(self.description)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def load(model: str | Path) -> TokenizerSpec:
    """Load a tokenizer by hub id, folder, or path of a tokenizer.json.

    Raises
    ------
    ValueError : it is not found (the message explains how to get it), or it has no Rust ("fast") form
    """
    tokenizer = _from_transformers(str(model))
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"{model} has only a Python tokenizer; convert it with transformers.convert_slow_tokenizer")
    eod = tokenizer.eos_token or tokenizer.sep_token
    return TokenizerSpec(
        name=str(Path(model).resolve()) if os.path.exists(model) else str(model),
        description=tokenizer.backend_tokenizer.to_str(),
        vocab_size=len(tokenizer),
        max_id=max(tokenizer.get_vocab().values(), default=0),
        eod_id=None if eod is None else int(tokenizer.convert_tokens_to_ids(eod)),
    )


def _from_transformers(model: str) -> Any:
    """A `PreTrainedTokenizerBase`; transformers takes seconds to import, so only here."""
    from transformers import PreTrainedTokenizerFast

    path = Path(model)
    if path.is_file():
        if not (path.parent / "tokenizer_config.json").exists():
            return PreTrainedTokenizerFast(tokenizer_file=model, eos_token=_likely_eos(path))
        path = path.parent
    try:
        # from a folder with only a config.json, transformers creates a tokenizer without words
        if path.is_dir() and not any(path.glob("*token*")) and not any(path.glob("vocab*")):
            raise FileNotFoundError("the folder has no tokenizer")
        return tokenizer_of(path, local_files_only=not (path.is_dir() or hub_is_known()))
    except Exception as error:
        why = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--tokenizer-model must be a hub id, a tokenizer.json, or a folder with one; {model} could not be "
            f"read ({why}); get one with: hf download HUB_ID --include 'tokenizer*' --include "
            "'special_tokens_map.json' --local-dir DIR (some need hf auth login first)"
        ) from error


def _likely_eos(path: Path) -> str | None:
    """A bare tokenizer.json does not define the token that ends a text: use a well-known one of its added tokens."""
    added = {t["content"] for t in json.loads(path.read_text(encoding="utf-8")).get("added_tokens", [])}
    known = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
    return next((token for token in known if token in added), None)
