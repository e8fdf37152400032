"""Tensors in `.safetensors` files, written and read a part at a time, and the index of a checkpoint's tensors.

Every rank of a run writes one file, and `index.json` says what whole tensors the pieces in these files make:

    {"decoder.layers.0.mlp.linear_fc1.weight": {"dtype": "F32", "shape": [6, 4], "pieces": [
        {"file": "rank-00000.safetensors", "offset": [0, 0], "shape": [3, 4], "elements": [0, 12]},
        {"file": "rank-00001.safetensors", "offset": [3, 0], "shape": [3, 4], "elements": [0, 7]},
        {"file": "rank-00003.safetensors", "offset": [3, 0], "shape": [3, 4], "elements": [7, 12]}]}}

A box of `shape` at `offset` is what a tensor-parallel rank has. Of the flattened box, a piece is the elements from the
first number up to the second: the distributed optimizer splits boxes over data-parallel ranks. In its file, a piece
has the whole tensor's name and one dim.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, model_validator
from torch import Tensor

INDEX = "index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
"""By what the format calls them."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER = 100 * 10**6
"""Bytes; safetensors takes no longer one."""
Kind = tuple[torch.dtype, list[int]]
"""Type and shape of a tensor."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names it and says why."""


def reason(error: BaseException) -> str:
    """Why torch refused a file, in one line, without its advice to unpickle it all the same."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, pickle.UnpicklingError):
        lines = [line for line in lines if line.startswith(("Trying", "Unsupported"))] or ["it is no tensor"]
    return " ".join(lines)[:300].rstrip(".") or type(error).__name__


# ---- files --------------------------------------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> memoryview:
    """Those of a tensor on the CPU; of a contiguous one its own, not a copy."""
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))  # a view of one number may keep a stride
    return flat.view(torch.uint8).numpy().data


def write(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], kinds: Mapping[str, Kind] | None = None
) -> dict[str, Any]:
    """As safetensors' `save_file`, which must have all tensors in memory; here each is asked for when it is written.

    kinds : of the tensors, where known. Returns what `base.files.listed_as` says of the file, without reading it.
    """
    kinds = kinds or {name: (t.dtype, list(t.shape)) for name, t in tensors.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    # the widest first, so that each begins at a multiple of its own width
    for name in sorted(tensors, key=lambda name: -kinds[name][0].itemsize):
        dtype, shape = kinds[name]
        if dtype not in NAMES:
            raise CheckpointError(f"the weight {name} must be float32, bfloat16 or float16; it is {dtype}")
        end = place + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8, as in all such files
    digest = hashlib.sha256()
    with file.open("wb") as f:
        for part in (len(text).to_bytes(8, "little") + text, *list(header)[1:]):
            data: Any = bytes_of(tensors[part]) if isinstance(part, str) else part
            f.write(data)
            digest.update(data)
        return {"bytes": f.tell(), "sha256": digest.hexdigest()}


class Place(NamedTuple):
    """Where a tensor is in a file."""

    dtype: torch.dtype
    shape: list[int]
    begin: int  # byte of the file


def places_in(file: Path) -> tuple[dict[str, Place], dict[str, str]]:
    """Where the tensors of a `.safetensors` are, and its metadata.

    CheckpointError : it is damaged, or has another type of number.
    """
    try:
        if not file.is_file():
            raise ValueError("it is no regular file")
        with file.open("rb") as f:
            start, size = 8 + int.from_bytes(f.read(8), "little"), file.stat().st_size
            header: dict[str, Any] = json.loads(f.read(max(0, min(start, size, MOST_HEADER) - 8)))
        about, out = header.pop("__metadata__", {}), {}
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name!r:.120} must be float32, bfloat16 or float16; it is {entry['dtype']!r:.40}")
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            sizes_fit = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            if not sizes_fit or end - begin != math.prod(shape) * dtype.itemsize or start + end > size:
                raise ValueError(f"{name!r:.120} is not all there")
            out[name] = Place(dtype, shape, start + begin)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is missing or damaged ({reason(error)}); fetch or export it again") from None
    return out, about


# ---- index --------------------------------------------------------------------------------------------------------

Count = Annotated[int, Field(ge=0)]


class Piece(BaseModel, strict=True, extra="forbid"):
    """A range of elements of a box of a whole tensor; see above."""

    file: Annotated[str, StringConstraints(pattern=r"^rank-\d+\.safetensors$")]
    offset: list[Count]
    shape: list[Count]
    elements: Annotated[list[Count], Field(min_length=2, max_length=2)]


class Entry(BaseModel, strict=True, extra="forbid"):
    """A whole tensor."""

    dtype: Literal["F32", "BF16", "F16"]
    shape: list[Count]
    pieces: list[Piece]

    @model_validator(mode="after")
    def _pieces_make_it(self) -> Entry:
        for p in self.pieces:
            box = [(o, o + n) for o, n in zip(p.offset, p.shape)]
            within = len(p.offset) == len(p.shape) == len(self.shape) and all(
                e <= n for (_, e), n in zip(box, self.shape)
            )
            if not within or not p.elements[0] <= p.elements[1] <= math.prod(p.shape):
                raise ValueError("a piece must lie within its tensor")
        if sum(p.elements[1] - p.elements[0] for p in self.pieces) != math.prod(self.shape):
            raise ValueError("the pieces must make the whole tensor")
        return self


_INDEX = TypeAdapter(dict[str, Entry])


class Index:
    """Whole tensors of a checkpoint folder by name, and parts of them, read when they are asked for.

    CheckpointError : `index.json` is damaged.
    """

    def __init__(self, folder: Path):
        self.folder, path = folder, folder / INDEX
        try:
            self.entries = _INDEX.validate_json(path.read_bytes())
            # a shape is numbers that anybody can write: no memory is taken for more than the files have
            need = sum(math.prod(e.shape) * DTYPES[e.dtype].itemsize for e in self.entries.values())
            if need > sum((folder / file).stat().st_size for file in self.files()):
                raise ValueError("its tensors are larger than the files")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is missing or damaged ({reason(error)}); use another checkpoint") from None
        self._places = functools.cache(lambda file: places_in(folder / file)[0])

    def files(self) -> set[str]:
        """Names of those that the pieces are in."""
        return {piece.file for entry in self.entries.values() for piece in entry.pieces}

    def whole(self, name: str) -> Tensor:
        """A whole tensor in its own type."""
        shape = self.entry(name).shape
        return self.part(name, [0] * len(shape), shape)

    def part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of `shape` at `offset`. Of the stored boxes that overlap it, the rows that it needs are read."""
        entry, found, out = self.entry(name), 0, None
        for o, s in dict.fromkeys((tuple(p.offset), tuple(p.shape)) for p in entry.pieces):
            first = [max(a, b) for a, b in zip(offset, o)]
            last = [min(a + n, b + m) for a, n, b, m in zip(offset, shape, o, s)]
            if not all(a < b for a, b in zip(first, last)):
                continue
            lead, rest = ((first[0] - o[0], last[0] - o[0]), s[1:]) if s else ((0, 1), ())
            row = math.prod(rest)
            rows = self.elements(name, o, s, lead[0] * row, lead[1] * row).view(-1, *rest)
            inner = rows[:, *(slice(a - b, c - b) for a, c, b in zip(first[1:], last[1:], o[1:]))]
            if inner.numel() == math.prod(shape):
                return inner.reshape(tuple(shape))
            out = torch.empty(tuple(shape), dtype=DTYPES[entry.dtype]) if out is None else out
            out[tuple(slice(a - b, c - b) for a, c, b in zip(first, last, offset))] = inner
            found += inner.numel()
        if out is None or found != out.numel():
            raise CheckpointError(f"{self.folder} does not hold all of {name}; use another checkpoint")
        return out

    def elements(self, name: str, offset: Sequence[int], shape: Sequence[int], first: int, last: int) -> Tensor:
        """Elements first .. last of the flattened box of `shape` at `offset`, [last - first]."""
        entry, found = self.entry(name), 0
        pieces = [p for p in entry.pieces if (p.offset, p.shape) == (list(offset), list(shape))]
        if not pieces:
            return self.part(name, offset, shape).flatten()[first:last]
        out = torch.empty(last - first, dtype=DTYPES[entry.dtype])
        for piece in pieces:
            start, end = piece.elements
            a, b = max(first, start), min(last, end)
            if a < b:
                self._read(piece, name, a - start, out[a - first : b - first])
                found += b - a
        if found != len(out):
            raise CheckpointError(f"{self.folder} does not hold all of {name}; use another checkpoint")
        return out

    def entry(self, name: str, shape: list[int] | None = None) -> Entry:
        """CheckpointError when there is none of that name, or it has another shape."""
        found = self.entries.get(name)
        if found is None or shape not in (None, found.shape):
            what = f"lacks {name}" if found is None else f"has {name} as {found.shape} and not {shape}"
            raise CheckpointError(f"{self.folder} {what}: it is damaged or of another model; use another checkpoint")
        return found

    def _read(self, piece: Piece, name: str, at: int, out: Tensor) -> None:
        """Numbers `at` and on of a piece."""
        file, place = self.folder / piece.file, self._places(piece.file).get(name)
        if place is None or place.dtype != out.dtype or place.shape != [piece.elements[1] - piece.elements[0]]:
            raise CheckpointError(f"{file} does not hold {name} as {INDEX} says; use another checkpoint")
        with file.open("rb") as f:
            f.seek(place.begin + at * out.itemsize)
            if f.readinto(bytes_of(out)) != out.nbytes:
                raise CheckpointError(f"{file} is cut off; use another checkpoint")
