"""Tensors of floats from the bytes of `torch.save` or `pickle`, without running code and in bounded memory.

Both forms describe a tensor by a short pickle. Here a machine of the few instructions that such a description needs
reads it: it calls nothing, and makes nothing larger than what it was given. Numbers are then copied once from where
they lie in the bytes, so that memory stays below the bytes and the tensor together.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch

MOST_STEPS, MOST_RECORDS, LONGEST_TEXT = 400, 64, 1000
"""Instructions of a pickle, records of a zip, bytes of a name: some ten times what a tensor needs."""

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001
"""Head of what `torch.save` wrote before it wrote zips, and writes of a storage still."""

DTYPES = {
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
}


class _Name(Enum):
    """Functions that a description names; none of them is called."""

    REBUILD = 1
    LOAD = 2
    ORDERED_DICT = 3


NAMES: dict[tuple[str, str], _Name | torch.dtype] = {
    ("collections", "OrderedDict"): _Name.ORDERED_DICT,
    ("torch._utils", "_rebuild_tensor_v2"): _Name.REBUILD,
    ("torch.storage", "_load_from_bytes"): _Name.LOAD,
    ("megatron.core.safe_globals", "safe_load_from_bytes"): _Name.LOAD,  # the same in 0.19
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


@dataclass
class _Storage:
    """Numbers in a row; `data` is where they lie."""

    dtype: torch.dtype
    numel: int
    data: memoryview | None = None

    def put(self, data: memoryview) -> None:
        size = self.numel * self.dtype.itemsize
        if not 0 <= size <= len(data):
            raise ValueError(f"it says {self.numel} numbers and holds {len(data)} bytes")
        self.data = data[:size]


class _Layout(NamedTuple):
    """A tensor that is not made yet."""

    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> torch.Tensor:
        """ValueError when it reaches beyond its storage or has more numbers."""
        storage, offset, size, stride = self
        if not isinstance(storage, _Storage) or storage.data is None:
            raise ValueError("its numbers are missing")
        if len(size) != len(stride) or not all(type(n) is int and n >= 0 for n in (offset, *size, *stride)):
            raise ValueError("its size and strides are none")
        last = offset + sum((n - 1) * s for n, s in zip(size, stride))
        count: int = math.prod(list(size))
        if count > storage.numel or (count and last >= storage.numel):
            raise ValueError(f"a tensor of {list(size)!r:.60} is larger than its {storage.numel} numbers")
        flat = torch.empty(storage.numel, dtype=storage.dtype)
        if storage.numel:
            flat.view(torch.uint8).numpy()[:] = np.frombuffer(storage.data, np.uint8)
        return flat.as_strided(size, stride, offset)


def read_pickle(data: bytes) -> object:
    """The tensor that was pickled, or whatever else the pickle holds; any exception means that it was refused."""
    value, _ = _run(memoryview(data), 0, _no_storage, lambda inner: _saved(bytes(inner)))
    return value.tensor() if isinstance(value, _Layout) else value


def read_saved(data: bytes) -> object:
    """The same of what `torch.save` wrote."""
    value = _saved(data)
    return value.tensor() if isinstance(value, _Layout) else value


# ---- torch.save ---------------------------------------------------------------------------------------------------


def _saved(data: bytes) -> Any:
    return _zipped(data) if data.startswith(b"PK") else _legacy(memoryview(data))


def _zipped(whole: bytes) -> Any:
    if whole.count(b"PK\x01\x02") > MOST_RECORDS:  # each record of the zip's listing begins with it
        raise ValueError("its zip has more records than a tensor needs")
    records, data = {}, memoryview(whole)
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
    _check_little(records.get(f"{prefix}byteorder", b"little") == b"little")

    def storage(kind: str, dtype: torch.dtype, key: str, _location: str, numel: int) -> _Storage:
        found = _new_storage(kind, dtype, key, numel)
        found.put(records[f"{prefix}data/{key}"])
        return found

    return _run(records[f"{prefix}data.pkl"], 0, storage)[0]


def _legacy(data: memoryview) -> Any:
    """Five pickles, then the numbers of each storage after their count."""
    storages: dict[str, _Storage] = {}

    def storage(kind: str, dtype: torch.dtype, key: str, _location: str, numel: int, view: None) -> _Storage:
        if view is not None:
            raise ValueError("it holds a view of a storage, which torch.save writes no more")
        return storages.setdefault(key, _new_storage(kind, dtype, key, numel))

    at = 0
    for wanted in (MAGIC, VERSION):
        found, at = _run(data, at, _no_storage)
        if found != wanted:
            raise ValueError("it is neither a zip nor has it the head of torch.save")
    system, at = _run(data, at, _no_storage)
    _check_little(_only(dict, system).get("little_endian"))
    value, at = _run(data, at, storage)
    keys, at = _run(data, at, _no_storage)
    for key in _only(list, keys):
        (numel,) = struct.unpack_from("<q", data, at)
        found = storages[_only(str, key)]
        if numel != found.numel:
            raise ValueError(f"it says {found.numel} numbers and then {numel}")
        found.put(data[at + 8 :])
        at += 8 + numel * found.dtype.itemsize
    return value


def _check_little(little: object) -> None:
    if little is not True:
        raise ValueError("it was written on a big-endian machine")


def _new_storage(kind: object, dtype: object, key: object, numel: object) -> _Storage:
    if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str or type(numel) is not int:
        raise ValueError("its storage is none of torch's")
    return _Storage(dtype, numel)


# ---- the machine --------------------------------------------------------------------------------------------------

_NUMBERS = {
    pickle.PROTO: "<B",
    pickle.FRAME: "<Q",
    pickle.BININT: "<i",
    pickle.BININT1: "<B",
    pickle.BININT2: "<H",
    pickle.BINPUT: "<B",
    pickle.LONG_BINPUT: "<I",
    pickle.BINGET: "<B",
    pickle.LONG_BINGET: "<I",
    # the length of what follows
    pickle.BINUNICODE: "<I",
    pickle.SHORT_BINUNICODE: "<B",
    pickle.BINBYTES: "<I",
    pickle.SHORT_BINBYTES: "<B",
    pickle.BINBYTES8: "<Q",
    pickle.LONG1: "<B",
}
_CONSTANTS: dict[bytes, Callable[[], object]] = {
    pickle.NONE: lambda: None,
    pickle.NEWTRUE: lambda: True,
    pickle.NEWFALSE: lambda: False,
    pickle.EMPTY_TUPLE: tuple,
    pickle.EMPTY_LIST: list,
    pickle.EMPTY_DICT: dict,
}


def _no_storage(*_: object) -> _Storage:
    raise ValueError("it has a storage where there is none")


def _run(
    data: memoryview, at: int, storage: Callable[..., _Storage], load: Callable[[memoryview], Any] | None = None
) -> tuple[Any, int]:
    """What the pickle at `at` describes, and where it ends.

    storage : of a persistent id. load : of bytes that hold a storage.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def take(count: int) -> memoryview:
        nonlocal at
        at += count
        if at > len(data):
            raise ValueError("it is cut off")
        return data[at - count : at]

    def line() -> str:
        found = bytes(data[at : at + LONGEST_TEXT]).partition(b"\n")[0]
        return str(take(len(found) + 1)[:-1], "ascii")

    def above_mark() -> list:
        mark = marks.pop()
        items = stack[mark:]
        del stack[mark:]
        return items

    def text(count: int) -> str:
        if count > LONGEST_TEXT:
            raise ValueError("it has a text, which a tensor does not need")
        return str(take(count), "utf-8")

    for _ in range(MOST_STEPS):
        code = bytes(take(1))
        number = struct.unpack(_NUMBERS[code], take(struct.calcsize(_NUMBERS[code])))[0] if code in _NUMBERS else 0
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code]())
            continue
        match code:
            case pickle.PROTO | pickle.FRAME:
                pass
            case pickle.STOP:
                return stack.pop(), at
            case pickle.MARK:
                marks.append(len(stack))
            case pickle.BININT | pickle.BININT1 | pickle.BININT2:
                stack.append(number)
            case pickle.LONG1:
                stack.append(int.from_bytes(take(number), "little", signed=True))
            case pickle.BINUNICODE | pickle.SHORT_BINUNICODE:
                stack.append(text(number))
            case pickle.BINBYTES | pickle.SHORT_BINBYTES | pickle.BINBYTES8:
                stack.append(take(number))
            case pickle.TUPLE:
                stack.append(tuple(above_mark()))
            case pickle.TUPLE1 | pickle.TUPLE2 | pickle.TUPLE3:
                count = 1 + (pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3).index(code)
                stack[-count:] = [tuple(stack[-count:])]
            case pickle.APPEND | pickle.APPENDS:
                items = [stack.pop()] if code == pickle.APPEND else above_mark()
                _only(list, stack[-1]).extend(items)
            case pickle.SETITEM | pickle.SETITEMS:
                items = [stack.pop(-2), stack.pop()] if code == pickle.SETITEM else above_mark()
                _only(dict, stack[-1]).update((_only(str, k), v) for k, v in zip(items[::2], items[1::2]))
            case pickle.BINPUT | pickle.LONG_BINPUT:
                memo[number] = stack[-1]
            case pickle.MEMOIZE:
                memo[len(memo)] = stack[-1]
            case pickle.BINGET | pickle.LONG_BINGET:
                stack.append(memo[number])
            case pickle.GLOBAL:
                stack.append(_named(line(), line()))
            case pickle.STACK_GLOBAL:
                stack.append(_named(stack.pop(-2), stack.pop()))
            case pickle.BINPERSID:
                stack.append(storage(*_only(tuple, stack.pop())))
            case pickle.REDUCE:
                arguments = _only(tuple, stack.pop())
                stack.append(_called(stack.pop(), arguments, load))
            case _:
                raise ValueError(f"it has the pickle instruction {code!r}, which a tensor does not need")
    raise ValueError(f"it has more than {MOST_STEPS} pickle instructions, which a tensor does not need")


def _only(kind: type, value: Any) -> Any:
    """`value`, seen to be plain: one whose parts occur many times over must not be printed, hashed or compared."""
    if type(value) is not kind:
        raise ValueError(f"it has {type(value).__name__} where a tensor has {kind.__name__}")
    return value


def _named(module: object, name: object) -> _Name | torch.dtype:
    found = NAMES.get((_only(str, module), _only(str, name)))
    if found is None:
        raise ValueError(f"it names {module}.{name}, which a tensor of floats does not need")
    return found


def _called(name: object, arguments: tuple, load: Callable[[memoryview], Any] | None) -> Any:
    """What a description makes of a call."""
    if name is _Name.ORDERED_DICT and not arguments:
        return {}
    if name is _Name.LOAD and load is not None and len(arguments) == 1:
        return load(_only(memoryview, arguments[0]))
    if name is _Name.REBUILD and len(arguments) in (6, 7) and not any(arguments[6:]):
        storage, offset, size, stride = arguments[:4]
        return _Layout(storage, offset, _only(tuple, size), _only(tuple, stride))
    raise ValueError("it calls what a tensor does not need")
