"""Reads the file of `dfm export`: weights by name and what else generation needs, in one `.safetensors` or `.pth`.

It holds tensors and one text, `dfm_nb` (in a `.safetensors`, of its metadata): JSON of

    format   "dfm_nb.weights.1"
    files    the text files that lie in a checkpoint folder: config.yaml, manifest.json
    sha256   of all the rest: that JSON, and each tensor's name, dtype, shape and bytes

A small binary file (the tokenizer, the empty caption) is a tensor of bytes, `file.NAME`. Reading runs no code.
"""

import functools
import hashlib
import io
import json
import pickle
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, StringConstraints, ValidationError
from torch import Tensor

from dfm_nb.base.files import CHECKSUMS, listed_as, seal
from dfm_nb.base.limits import MOST_BYTES
from dfm_nb.checkpoints.tensor_files import CheckpointError, Tensors, bytes_of, open_safetensors, reason

KEY, BYTES = "dfm_nb", "file."
TEXT, BINARY = r"^\w+\.(json|yaml)$", r"^\w+\.safetensors$"
"""Names of the small files: plain, so that none is unpacked outside its folder."""


class About(BaseModel, strict=True, extra="forbid"):
    """The text `dfm_nb`."""

    format: Literal["dfm_nb.weights.1"] = "dfm_nb.weights.1"
    files: dict[Annotated[str, StringConstraints(pattern=TEXT)], str]
    sha256: str = ""

    def json_text(self) -> str:
        """Canonical JSON, because a checksum covers it."""
        return json.dumps(dict(self), sort_keys=True)


def checksum(files: dict[str, str], tensors: Tensors) -> str:
    """Of the text files and all tensors."""
    digest = hashlib.sha256(About(files=files).json_text().encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(json.dumps([name, str(t.dtype), list(t.shape)]).encode())
        digest.update(bytes_of(t))
    return digest.hexdigest()


def read(file: Path) -> tuple[dict[str, Tensor], dict[str, bytes]]:
    """Weights by name, and the small files.

    Raises
    ------
    CheckpointError : the file is damaged, was changed, holds more than tensors, or is no export of dfm_nb.
    """
    if file.suffix == ".safetensors":
        tensors, about = open_safetensors(file)
        content: dict[str, Any] = {**tensors, KEY: about.get(KEY)}
    else:
        content = read_saved(file)
    text = content.pop(KEY, None)
    if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items()):
        raise CheckpointError(f"{file} must hold tensors by name and nothing else; export it again")
    try:
        header = About.model_validate_json(text if isinstance(text, str) else "")
    except ValidationError:
        raise CheckpointError(
            f"{file} has no text {KEY!r} of a known format; it is damaged, from another version, or from another tool "
            "(dfm import)"
        ) from None
    if checksum(header.files, content) != header.sha256:
        raise CheckpointError(f"{file} is damaged: its content does not match its checksum; copy it again")
    files = {}
    for stored in [*content]:
        if stored.startswith(BYTES):
            name = stored.removeprefix(BYTES)
            if not re.fullmatch(BINARY, name):
                raise CheckpointError(f"{file} must hold files of plain names only; it holds {name!r:.80}")
            files[name] = content.pop(stored).numpy().tobytes()
    return content, files | {name: value.encode() for name, value in header.files.items()}


@functools.cache
def unpacked(files: tuple[tuple[str, bytes], ...]) -> tempfile.TemporaryDirectory:
    """A folder with files of these names and contents, all listed; it is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="dfm_nb-")
    root = Path(folder.name)
    for name, content in files:
        (root / name).write_bytes(content)
    seal(root / CHECKSUMS, {name: listed_as(root / name) for name, _ in files})
    return folder


# ---- pickles ------------------------------------------------------------------------------------------------------
# Those in files of tensors, `.pth` and `.metadata`, are read without code and in bounded memory. One inert class stands
# in place of every class and function that a pickle names. Python's own unpickler reads it: the memo of that in C is a
# list as long as a place in it says. No tuple is a key, as the hash of a tuple of pairs of pairs takes twice the time
# for each level, and there are no sets, whose comparison does.

LEFT_OUT = (pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8, pickle.DICT)
"""Sets, bytes that are allocated before they are read, and a form of dict that nothing writes any more."""


class Record:
    """In place of any object of a pickle: what it was called with, and its state, which may be anything.

        torch.distributed.checkpoint.metadata Metadata GLOBAL    -> this class
        () NEWOBJ                                                -> an object of it with the arguments ()
        {"storage_data": ...} BUILD                              -> that dict is its state
        os system GLOBAL ("ls",) REDUCE                          -> an object of it with the arguments ("ls",)

    BUILD calls `__setstate__` and sets no attributes, also where it is of the class itself, which is a TypeError.
    """

    arguments: tuple
    state: Any = None

    def __new__(cls, *arguments: object) -> "Record":
        self = object.__new__(cls)
        self.arguments = arguments
        return self

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Of an OrderedDict, which is not read."""


class _Named(dict):
    """A dict without tuples as keys."""

    def __setitem__(self, key: object, value: object) -> None:
        if isinstance(key, tuple):
            raise ValueError("it has a tuple as a key")
        super().__setitem__(key, value)


LOADS = {code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in LEFT_OUT}
LOADS[pickle.EMPTY_DICT[0]] = lambda self: self.append(_Named())  # type: ignore[attr-defined]  # typeshed has C's


class _Inert(pickle._Unpickler):
    dispatch = LOADS

    def find_class(self, _module: str, _name: str) -> type[Record]:
        return Record

    def persistent_load(self, _place: object) -> None:
        """Numbers, which lie elsewhere."""


def read_pickle(data: bytes) -> Any:
    """The value; any exception means that it was refused."""
    return _Inert(io.BytesIO(data)).load()


def read_saved(file: Path) -> dict[Any, Any]:
    """The dict that `torch.save` wrote: tensors, mapped, and what else torch takes for harmless.

    Raises
    ------
    CheckpointError : it is damaged, or a tensor is none of plain numbers, or is a view of fewer than it has.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            (pickled,) = [info for info in archive.infolist() if info.filename.endswith("data.pkl")]
            if pickled.compress_type or pickled.file_size > MOST_BYTES:
                raise ValueError("its pickle is compressed or too large")
            read_pickle(archive.read(pickled))
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        tensors = [value for value in found.values() if isinstance(value, Tensor)]
        if sum(tensor.nbytes for tensor in tensors) > file.stat().st_size:
            raise ValueError("its tensors are views of fewer numbers")
        for tensor in tensors:
            bytes_of(tensor)
    except Exception as error:  # a damaged file can raise anything
        raise CheckpointError(f"{file} is damaged or holds more than tensors: {reason(error)}; copy it again") from None
    return found
