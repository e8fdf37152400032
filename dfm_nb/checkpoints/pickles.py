"""The pickles in files of tensors, `.pth` and `.metadata`, read without code and in bounded memory.

One inert class stands in place of every class and function that a pickle names. Python's own unpickler reads it: the
memo of that in C is a list as long as a place in it says. No tuple is a key, as the hash of a tuple of pairs of pairs
takes twice the time for each level, and there are no sets, whose comparison does.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dfm_nb.base.limits import MOST_BYTES
from dfm_nb.checkpoints.tensor_files import CheckpointError, bytes_of, reason

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

    def __new__(cls, *arguments: object) -> Record:
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
