"""Hugging Face tokenizers for text corpora: tokenizer.json as it is published, sent to worker processes as text.

transformers 5 builds another tokenizer for many a class in tokenizer_config.json: of GPT2Tokenizer it keeps the
vocabulary alone, and GPT-2's pattern merges digits that the file's pattern splits. So its classes tell only which token
ends a text, and build only what has no tokenizer.json. As in megatron.core's HuggingFaceTokenizer no special tokens are
added, so no BOS either; sep replaces a missing eos.
"""

import contextlib
import hashlib
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
import orjson
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from dfm_nb.base.files import ANYWHERE, plain
from dfm_nb.base.hub import tokenizer_of

PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes without an EOD of their own."""
SETTINGS = {"fast_tokenizer_files", "split_special_tokens", "fix_mistral_regex", "add_bos_token", "add_eos_token"}
"""Of tokenizer_config.json, with an effect on ids or, in the case of the last two, on the hash."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


def hub_is_known() -> bool:
    """False if the hub's host name cannot be resolved; its client would retry for a minute."""
    from huggingface_hub import constants

    if getproxies().keys() & {"https", "all"}:
        return True
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443))
    return False


@dataclass(frozen=True)
class TokenizerSpec:
    """A tokenizer as data. `vocab_size` includes added tokens; `max_id` is its largest id."""

    name: str
    description: str  # the whole tokenizer.json
    vocab_size: int
    max_id: int
    eod_id: int | None
    split_special_tokens: bool = False  # "<|endoftext|>" in a text is text; tokenizer.json cannot hold it

    @property
    def sha256(self) -> str:
        text = self.description
        if self.split_special_tokens:
            text += "split_special_tokens"
        return hashlib.sha256(text.encode()).hexdigest()

    def check(self, dtype: np.dtype, append_eod: bool) -> None:
        """Raise ValueError unless every id fits in `dtype`, and there is an EOD token if one is needed."""
        top = np.iinfo(dtype).max
        if self.max_id > top:
            raise ValueError(f"{dtype} holds ids up to {top}; {self.name} has id {self.max_id}; use --dtype int32")
        if append_eod and self.eod_id is None:
            fix = "add it, or the model's config.json"
            raise ValueError(f"--append-eod needs an eos_token in {self.name}/tokenizer_config.json; {fix}")

    def backend(self) -> Tokenizer:
        """The tokenizer itself, with truncation and padding off."""
        tokenizer = Tokenizer.from_str(self.description)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = self.split_special_tokens
        return tokenizer


def load(model: str | Path) -> TokenizerSpec:
    """Load a tokenizer by hub id, folder, or path of a tokenizer.json.

    Raises
    ------
    ValueError : it is not found (the message explains how to get it), or it has no Rust ("fast") form
    """
    model = str(model)
    path = Path(model)
    try:
        for file in path.glob("*.json"):  # a pipe would never end
            plain(file, ANYWHERE)
        tokenizer, eod = _plain(path) or _from_transformers(path)
    except Exception as error:
        why = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--tokenizer-model must be a hub id, a tokenizer.json, or a folder with one; {model} could not be "
            f"read ({why}); get one with: hf download HUB_ID --include 'tokenizer*' --include "
            "'special_tokens_map.json' --include config.json --local-dir DIR (some need hf auth login first)"
        ) from error
    ids = tokenizer.get_vocab(with_added_tokens=False).values()
    if len(set(ids)) < len(ids) or getattr(tokenizer.model, "dropout", None):  # other ids in each run
        raise ValueError(f"the tokenizer must have an id for each token and no dropout; correct that of {model}")
    return TokenizerSpec(
        name=str(path.resolve()) if path.exists() else model,
        description=tokenizer.to_str(),
        vocab_size=tokenizer.get_vocab_size(),
        max_id=max(tokenizer.get_vocab().values(), default=0),
        eod_id=None if eod is None else tokenizer.token_to_id(eod),
        split_special_tokens=tokenizer.encode_special_tokens,
    )


def _plain(path: Path) -> tuple[Tokenizer, str | None] | None:
    """The tokenizer and its EOD, without transformers, whose import takes seconds.

    None where transformers does more than read the file: for settings, tokens to add, or the EOD of a class.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    config = file.with_name("tokenizer_config.json")
    if not file.is_file() or (path.is_dir() and not config.exists()):
        return None
    about = orjson.loads(file.read_bytes())
    added = {str(token.pop("id")): token for token in about.get("added_tokens", ())}
    words = {token["content"] for token in added.values()}
    settings: dict[str, Any] = {"tokenizer_class": "TokenizersBackend"}
    if config.exists():
        settings = orjson.loads(config.read_bytes())
    else:  # the token that ends a text is not defined: a well-known one of those added
        settings["eos_token"] = next((token for token in ENDS if token in words), None)
    decoder = settings.get("added_tokens_decoder", {})
    older = () if decoder else ("special_tokens_map.json", "added_tokens.json")
    named: set[str | None] = set()
    for name, value in settings.items():
        if name.endswith(("_token", "_special_tokens")) and not isinstance(value, bool):
            named.update(map(_content, value if isinstance(value, list) else [value]))
    named.discard(None)
    eod = _content(settings.get("eos_token") or settings.get("sep_token"))
    if (
        (eod is None and settings.get("tokenizer_class") not in PLAIN_CLASSES)
        or settings.keys() & SETTINGS
        or any(file.with_name(name).exists() for name in older)
        or any(added.get(number) != token for number, token in decoder.items())
        or named - words
        or about.get("padding")
    ):
        return None
    tokenizer = Tokenizer.from_file(str(file))
    if tokenizer.post_processor is None:  # as transformers fills it, which the hash records
        tokenizer.post_processor = TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    return tokenizer, eod


def _content(token: Any) -> Any:
    """The text of a token in tokenizer_config.json."""
    return token.get("content") if isinstance(token, dict) else token


def _from_transformers(path: Path) -> tuple[Tokenizer, str | None]:
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    if path.is_file() and path.name != "tokenizer.json":
        raise ValueError("transformers reads tokenizer.json alone; rename the file")
    folder = path.parent if path.is_file() else path
    # from a folder with only a config.json, transformers creates a tokenizer without words
    if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
        raise FileNotFoundError("the folder has no tokenizer")
    where: dict[str, Any] = {"local_files_only": not (folder.is_dir() or hub_is_known())}
    if cached_file(folder, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **where) is None:
        tokenizer = named = tokenizer_of(folder, **where)
    else:
        tokenizer = named = PreTrainedTokenizerFast.from_pretrained(folder, **where)
        if (tokenizer.eos_token or tokenizer.sep_token) is None:
            with contextlib.suppress(Exception):  # a class that cannot be built names no token
                named = tokenizer_of(folder, **where)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError("it has only a Python form; convert it with transformers.convert_slow_tokenizer")
    return tokenizer.backend_tokenizer, named.eos_token or named.sep_token
