"""Tensors of floats from the bytes of `torch.save` or `pickle`, without running code and in bounded memory.

Both formats describe a tensor by a short pickle. It is scanned first, because Python's unpickler allocates as much as
an instruction says. Then an `Unpickler` reads it, which knows a few names and only makes descriptions for them. Numbers
are copied once, at the end, from their position in the bytes, so memory stays below four times the bytes.
"""

import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

OPCODES = frozenset(
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINUNICODE SHORT_BINUNICODE BINBYTES "
    "SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT BINPUT "
    "LONG_BINPUT MEMOIZE BINGET LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID REDUCE".split()
)
"""Not BUILD, which sets attributes, nor SETITEM, which hashes: a tuple of tuples may take forever."""

# some ten times what a tensor needs
MOST_STEPS = 400  # instructions of a pickle
MOST_RECORDS = 64  # of a zip
LONGEST_TEXT = 1000  # characters of a name

SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
HEAD = b"".join(pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, SYSTEM))
"""What `torch.save` began with before it wrote zips; it still does for the storage in a pickled tensor."""


class _Storage(NamedTuple):
    """Numbers in a row, as a view of the bytes."""

    dtype: torch.dtype
    data: memoryview


class _Layout(NamedTuple):
    """The description of a tensor."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def read_pickle(data: bytes) -> object:
    """The pickled tensor, or another value in the pickle; any exception means that it was refused."""
    return _made(_Unpickler(data, names=NAMES | dict.fromkeys(LOADS, _loaded)).load())


def read_saved(data: bytes) -> object:
    """The same for `torch.save`."""
    return _made(_saved(data))


def _made(value: Any) -> Any:
    if type(value) is not _Layout:
        return value
    (dtype, data), offset, size, stride = value
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(dtype).as_strided(size, stride, offset)


# ---- what the names mean -------------------------------------------------------------------------
# Values of a pickle are never compared, hashed or printed before their type is known: see
# `OPCODES`.


def _rebuilt(storage: Any, offset: Any, size: Any, stride: Any, _grad: object, _hooks: object, more: Any = None) -> Any:
    """For `torch._utils._rebuild_tensor_v2`; ValueError if it reaches beyond its storage or has more numbers.

    Of size (2, 3), stride (4, 1) and offset 5, the last number is at 5 + 1 * 4 + 2 * 1 = 11: the storage needs 12.
    A stride of 0 repeats numbers, so (2, 3) with (0, 0) would need one; six are required anyway.
    """
    if type(storage) is not _Storage or type(size) is not tuple or type(stride) is not tuple or more:
        raise ValueError("it is not a plain tensor with its own storage")
    if len(size) != len(stride) or not all(type(n) is int and n >= 0 for n in (offset, *size, *stride)):
        raise ValueError("its size, strides and offset do not describe a tensor")
    last = offset + sum((n - 1) * s for n, s in zip(size, stride))
    count = math.prod(size)
    numel = len(storage.data) // storage.dtype.itemsize
    if count > numel or (count and last >= numel):
        raise ValueError(f"a tensor of {list(size)!r:.60} is larger than its {numel} numbers")
    return _Layout(storage, offset, size, stride)


def _loaded(data: Any) -> _Storage:
    """For `torch.storage._load_from_bytes`."""
    value = _saved(data) if type(data) is bytes else None
    if type(value) is not _Storage:
        raise ValueError("its storage is not one of torch's")
    return value


NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): lambda: None,  # of hooks, which are not used
    ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "DoubleStorage"): torch.float64,
}
LOADS = ("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes")
"""megatron-core 0.19 uses the second. Only a pickle may contain them; what they load may not, so nothing nests."""


# ---- torch.save ----------------------------------------------------------------------------------


def _saved(data: bytes) -> Any:
    return _zipped(data) if data.startswith(b"PK") else _legacy(data)


def _zipped(whole: bytes) -> Any:
    if whole.count(b"PK\x01\x02") > MOST_RECORDS:  # each record of the zip's listing begins with it
        raise ValueError("its zip has more records than a tensor needs")
    records = {}
    data = memoryview(whole)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                raise ValueError("its zip is compressed, as torch.save writes none")
            name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            if start + info.file_size > len(data):
                raise ValueError("its zip is cut off")
            records[info.filename] = data[start : start + info.file_size]
    (prefix,) = [n.removesuffix("data.pkl") for n in records if n.rpartition("/")[2] == "data.pkl"]
    if records.get(f"{prefix}byteorder", b"little") != b"little":
        raise ValueError("it was written on a big-endian machine")
    return _Unpickler(bytes(records[f"{prefix}data.pkl"]), lambda key: records[f"{prefix}data/{key}"]).load()


def _legacy(data: bytes) -> Any:
    """The old format: a head, a pickle of the tensor, a pickle of the storage's key, a count, and the numbers."""
    if not data.startswith(HEAD):
        raise ValueError("it is neither a zip nor torch.save's old format")
    numbers = memoryview(data)[_end(data, _end(data, len(HEAD))) + 8 :]
    return _Unpickler(data, lambda _key: numbers, at=len(HEAD)).load()


# ---- the pickle ----------------------------------------------------------------------------------


def _end(data: bytes, at: int) -> int:
    """Where the pickle at `at` ends; ValueError if it has opcodes that a tensor does not need."""
    stream = io.BytesIO(data)
    stream.seek(at)
    for step, (code, argument, _) in enumerate(pickletools.genops(stream)):
        if code.name not in OPCODES or step >= MOST_STEPS:
            raise ValueError(f"its pickle has {code.name} at step {step}, which a tensor does not need")
        if isinstance(argument, str) and len(argument) > LONGEST_TEXT:
            raise ValueError("it has a text, which a tensor does not need")
        # the unpickler's memo grows to it
        if code.name.endswith("PUT") and int(argument or 0) >= MOST_STEPS:
            raise ValueError(f"its pickle has the place {argument}, which a tensor does not need")
    return stream.tell()


class _Unpickler(pickle.Unpickler):
    """Reads the pickle at `at`. numbers : of a storage, by its key. names : the known names and their replacements."""

    def __init__(
        self, data: bytes, numbers: Callable[[str], memoryview] | None = None, at: int = 0, names: Mapping = NAMES
    ):
        _end(data, at)
        stream = io.BytesIO(data)
        stream.seek(at)
        super().__init__(stream)
        self.numbers = numbers
        self.names = names

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.names:
            raise ValueError(f"it names {f'{module}.{name}'!a:.100}, which a tensor of floats does not need")
        return self.names[module, name]

    def persistent_load(self, place: Any) -> _Storage:
        """The storage at ("storage", type, key, device, count); in the old format, None follows: it is not a view."""
        match place:
            case ("storage", torch.dtype() as dtype, str(key), _, int(count), *view) if view in ([], [None]):
                if self.numbers is None:
                    raise ValueError("its pickle has a storage outside of torch.save")
                data = self.numbers(key)
                size = count * dtype.itemsize
                if not 0 <= size <= len(data):
                    raise ValueError(f"it says {count} numbers and holds {len(data)} bytes")
                return _Storage(dtype, data[:size])
        raise ValueError("its storage is not one of torch's")
