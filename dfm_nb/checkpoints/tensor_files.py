"""Tensors in `.safetensors` files, written and read in parts, and the index of a checkpoint's tensors.

Every rank of a run writes one file; `index.json` says how the pieces in these files make whole tensors:

    {"decoder.layers.0.mlp.linear_fc1.weight": {"dtype": "F32", "shape": [6, 4], "pieces": [
        {"file": "rank-00000.safetensors", "offset": [0, 0], "shape": [3, 4], "elements": [0, 12]},
        {"file": "rank-00001.safetensors", "offset": [3, 0], "shape": [3, 4], "elements": [0, 7]},
        {"file": "rank-00003.safetensors", "offset": [3, 0], "shape": [3, 4], "elements": [7, 12]}]}}

A box of `shape` at `offset` is a tensor-parallel rank's part. A piece is a range of elements of the flattened box,
because the distributed optimizer splits boxes over data-parallel ranks. In its file, a piece has the whole tensor's
name and one dim.
"""

import functools
import hashlib
import json
import math
import mmap
import pickle
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, model_validator
from torch import Tensor

from dfm_nb.base.files import Json, parsed, replacing
from dfm_nb.base.limits import MOST_HEADER

INDEX = "index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
"""By their names in the format."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
OPTIMIZER, EMA = "optimizer.", "ema."
"""Prefixes of names that are no weights: `optimizer.exp_avg.final.weight`, `ema.0.1.final.weight`."""
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Of mmap(2); Python names it from 3.13 on."""
Tensors = Mapping[str, Tensor]
"""By name."""
Kind = tuple[torch.dtype, list[int]]
"""Type and shape of a tensor."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message has its path and the reason."""


def reason(error: BaseException) -> str:
    """Why torch refused a file, in one line, without torch's advice to unpickle it anyway."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, pickle.UnpicklingError):
        lines = [line for line in lines if line.startswith(("Trying", "Unsupported"))] or ["it is no tensor"]
    return " ".join(lines)[:300].rstrip(".") or type(error).__name__


# ---- files --------------------------------------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU; not a copy if it is contiguous."""
    # a view of one number may keep a stride
    flat = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


def write(file: Path, tensors: Tensors, metadata: Mapping[str, str], kinds: Mapping[str, Kind] | None = None) -> Json:
    """Like safetensors' `save_file`, whole or absent, but each tensor is requested only when it is written.

    kinds : types and shapes, if known. Returns what `base.files.listed_as` returns, without reading the file.
    """
    kinds = kinds or {name: (t.dtype, list(t.shape)) for name, t in tensors.items()}
    header: Json = {"__metadata__": metadata}
    place = 0
    # widest types first, so that each tensor starts at a multiple of its item size
    names = sorted(tensors, key=lambda name: -kinds[name][0].itemsize)
    for name in names:
        dtype, shape = kinds[name]
        if dtype not in NAMES:
            raise CheckpointError(f"the weight {name} must be float32, bfloat16 or float16; it is {dtype}")
        end = place + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8, as safetensors requires
    digest = hashlib.sha256()
    with replacing(file) as temporary, temporary.open("wb") as f:

        def put(data: bytes | memoryview) -> None:
            f.write(data)
            digest.update(data)

        put(len(text).to_bytes(8, "little") + text)
        for name in names:
            put(bytes_of(tensors[name]))
        return {"bytes": f.tell(), "sha256": digest.hexdigest()}


class Lazy(UserDict[str, Any]):
    """Tensors by name, each made on access, for weights that are larger than memory."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Tensor]):
        self.data = dict.fromkeys(names, make)

    def __getitem__(self, name: str) -> Tensor:
        return self.data[name](name)


def open_safetensors(file: Path, apart: bool = False) -> tuple[Lazy, dict[str, str]]:
    """Tensors and metadata; CheckpointError for a damaged file or an unknown dtype.

    A tensor stays on disk until it is read; writes to it stay in memory.

    apart : map tensors one by one instead of the whole file, for machines with a low `ulimit -v`; each mapped tensor
        counts for `ulimit -n`.
    """
    try:
        if not file.is_file():
            raise ValueError("it is no regular file")
        with file.open("rb") as f:
            start = 8 + int.from_bytes(f.read(8), "little")
            size = file.stat().st_size
            header: Json = parsed(f.read(max(0, min(start, size, MOST_HEADER) - 8)))
        about = header.pop("__metadata__", {})
        places = {}
        for name, entry in header.items():
            dtype = DTYPES.get(entry["dtype"])
            if dtype is None:
                raise ValueError(f"{name!r:.120} must be float32, bfloat16 or float16; it is {entry['dtype']!r:.40}")
            shape = entry["shape"]
            begin, end = entry["data_offsets"]
            sizes_fit = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            if not sizes_fit or end - begin != math.prod(shape) * dtype.itemsize or start + end > size:
                raise ValueError(f"{name!r:.120} is incomplete")
            places[name] = dtype, shape, start + begin, end - begin
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is missing or damaged ({reason(error)}); fetch or export it again") from None

    whole = None if apart else _mapped(file, 0, size)

    def one(name: str) -> Tensor:
        dtype, shape, begin, length = places[name]
        if not length:
            return torch.empty(shape, dtype=dtype)
        first = 0 if whole else begin - begin % mmap.ALLOCATIONGRANULARITY
        pages = whole or _mapped(file, first, begin - first + length)
        return torch.frombuffer(pages, dtype=dtype, count=length // dtype.itemsize, offset=begin - first).view(shape)

    return Lazy(places, one), about


def _mapped(file: Path, first: int, length: int) -> mmap.mmap:
    """A private, writable map of a file. safetensors' own map fails for a file larger than memory."""
    with file.open("rb") as f:
        # Without NORESERVE, Linux promises memory for each page of a private map.
        return mmap.mmap(f.fileno(), length, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, offset=first)


def assembled(name: str, shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """The tensor that boxes at offsets make; CheckpointError if they do not.

    The shape is untrusted: no more memory is allocated than the boxes have.
    """
    if not boxes or sum(box.numel() for _, box in boxes) != math.prod(shape):
        raise CheckpointError(f"{name} is incomplete")
    first = boxes[0][1]
    if first.shape == tuple(shape):
        return first
    out = torch.empty(tuple(shape), dtype=first.dtype)
    for offset, box in boxes:
        target = out[tuple(slice(o, o + n) for o, n in zip(offset, box.shape, strict=True))]
        if target.shape != box.shape:
            raise CheckpointError(f"a part of {name} does not lie within it")
        target.copy_(box)
    return out


# ---- index --------------------------------------------------------------------------------------------------------

Count = Annotated[int, Field(ge=0)]


class Piece(BaseModel, strict=True, extra="forbid"):
    """A range of elements of a box of a whole tensor; see above."""

    file: Annotated[str, StringConstraints(pattern=r"^rank-\d+\.safetensors$")]
    offset: list[Count]
    shape: list[Count]
    elements: tuple[Count, Count]


class Entry(BaseModel, strict=True, extra="forbid"):
    """A whole tensor."""

    dtype: Literal["F32", "BF16", "F16"]
    shape: list[Count]
    pieces: list[Piece]

    @model_validator(mode="after")
    def _pieces_make_it(self) -> Self:
        count = 0
        for p in self.pieces:
            first, last = p.elements
            box = zip(p.offset, p.shape, self.shape, strict=True)
            if not all(o + n <= m for o, n, m in box) or not first <= last <= math.prod(p.shape):
                raise ValueError("a piece must lie within its tensor")
            count += last - first
        if count != math.prod(self.shape):
            raise ValueError("the pieces must make the whole tensor")
        return self


# one folder's is needed to verify it, to count its weights and to load them
@functools.lru_cache(maxsize=1)
def _entries(index: bytes) -> dict[str, Entry]:
    return TypeAdapter(dict[str, Entry]).validate_json(index)


class TensorIndex:
    """Whole tensors of a checkpoint folder by name, and parts of them, read on access.

    CheckpointError : `index.json` is damaged.
    """

    def __init__(self, folder: Path):
        self.folder, path = folder, folder / INDEX
        try:
            self.entries = _entries(path.read_bytes())
            # shapes are untrusted: no more memory is allocated than the files have
            need = sum(math.prod(e.shape) * DTYPES[e.dtype].itemsize for e in self.entries.values())
            if need > sum((folder / file).stat().st_size for file in self.files()):
                raise ValueError("its tensors are larger than the files")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is missing or damaged ({reason(error)}); use another checkpoint") from None
        self._open = functools.cache(lambda file: open_safetensors(folder / file, apart=True)[0])

    def files(self) -> set[str]:
        """Names of the files with the pieces."""
        names = set[str]()
        for entry in self.entries.values():
            names.update(piece.file for piece in entry.pieces)
        return names

    def whole(self, name: str) -> Tensor:
        """A whole tensor in its stored dtype."""
        shape = self.entry(name).shape
        return self.elements(name, [0] * len(shape), shape, 0, math.prod(shape)).view(shape)

    def part(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of `shape` at `offset`. Of stored boxes that overlap it, only the needed rows are read."""
        boxes = []
        for corner, size in dict.fromkeys((tuple(p.offset), tuple(p.shape)) for p in self.entry(name).pieces):
            place = []  # of the overlap in the result
            overlap = []  # the same in the stored box
            for wanted, length, begin, stored in zip(offset, shape, corner, size):
                first = max(wanted, begin)
                last = min(wanted + length, begin + stored)
                place.append(first - wanted)
                overlap.append(slice(first - begin, last - begin))
            if all(part.start < part.stop for part in overlap):
                top, *inner = overlap
                row = math.prod(size[1:])
                rows = self.elements(name, corner, size, top.start * row, top.stop * row)
                boxes.append((place, rows.view(-1, *size[1:])[:, *inner]))
        return assembled(f"{name} of {self.folder}", shape, boxes)

    def elements(self, name: str, offset: Sequence[int], shape: Sequence[int], first: int, last: int) -> Tensor:
        """Elements first .. last of the flattened box of `shape` at `offset`, [last - first].

        Only the needed part of that box's pieces is read. If no such box is stored, `part` builds it. The box of a
        scalar always is.
        """
        entry = self.entry(name)
        parts = []
        for piece in sorted(entry.pieces, key=lambda piece: piece.elements):
            if (piece.offset, piece.shape) != (list(offset), list(shape)):
                continue
            start, end = piece.elements
            stored = self._open(piece.file).get(name)
            if stored is None or (stored.dtype, stored.shape) != (DTYPES[entry.dtype], (end - start,)):
                file = self.folder / piece.file
                raise CheckpointError(f"{file} does not hold {name} as {INDEX} says; use another checkpoint")
            parts.append(stored[max(0, first - start) : max(0, last - start)])
        if not parts:
            return self.part(name, offset, shape).flatten()[first:last]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(out) != last - first:
            raise CheckpointError(f"{self.folder} does not hold all of {name}; use another checkpoint")
        return out

    def entry(self, name: str, shape: list[int] | None = None) -> Entry:
        """CheckpointError if there is none of that name, or it has another shape."""
        entry = self.entries.get(name)
        if entry is None or shape not in (None, entry.shape):
            what = f"lacks {name}" if entry is None else f"has {name} as {entry.shape} and not {shape}"
            raise CheckpointError(f"{self.folder} {what}: it is damaged or of another model; use another checkpoint")
        return entry
