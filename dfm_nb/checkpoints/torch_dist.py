"""The index of a torch_dist checkpoint, read without unpickling anything but plain records, and tensors by it.

`.metadata` is a pickle, and torch's own planner unpickles every entry that the index declares as bytes. Here the index
is taken apart, checked and built anew: tensors, each with the place of its parts in files of the same folder. torch
never sees the pickle, and an entry of bytes is never read.
"""

from __future__ import annotations

import math
import pickle
import warnings
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

# Private names, the same in 0.16 and 0.19. The public `load` of 0.18 and later unpickles the common values.
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as load_torch_dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

INDEX, COMMON = ".metadata", "common.pt"


def reason(error: BaseException) -> str:
    """Why torch refused a file, in one line, without its advice to unpickle it all the same."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, pickle.UnpicklingError):
        lines = [line for line in lines if line.startswith(("Trying", "Unsupported"))] or ["it is no tensor"]
    return " ".join(lines)[:300].rstrip(".") or type(error).__name__


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names it and says why."""


# ---- the pickle as records ----------------------------------------------------------------------------------------


class _Frozen(type):
    """A pickle can set attributes of the classes that it names: these have none that can be set.

    Opcodes of an index, and what they make here. Nothing is called but `_Record.__new__`, which keeps its arguments:

        torch.distributed.checkpoint.metadata Metadata    GLOBAL    -> the class `_Record` of that NAME
        () NEWOBJ                                                   -> a record of arguments ()
        {"storage_data": ...} BUILD                                 -> `__setstate__`: its state is that dict
        os system GLOBAL                                            -> UnpicklingError: it is not among `_KNOWN`
    """

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets the attribute {name} of a class")


class _Record(metaclass=_Frozen):
    """Stands for an object of the index: what it was called with, and its state, both unused until checked."""

    __slots__ = ("arguments", "state")
    NAME: ClassVar[str]
    arguments: tuple
    state: Any

    def __new__(cls, *arguments: object) -> _Record:
        self = object.__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: object) -> None:
        self.state = state


DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
_KNOWN = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", *DTYPES),
    "pathlib": ("PosixPath", "Path"),
}
_RECORDS: dict[tuple[str, str], type[_Record]] = {
    (module, name): _Frozen(name, (_Record,), {"__slots__": (), "NAME": name})  # type: ignore[misc]
    for module, names in _KNOWN.items()
    for name in names
}


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Record]:
        if (module, name) not in _RECORDS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return _RECORDS[module, name]


# ---- records as an index ------------------------------------------------------------------------------------------


class _Wrong(ValueError):
    """What the index must not hold."""


def _is(value: object, name: str) -> bool:
    return isinstance(value, _Record) and value.NAME == name


def _kind(value: object) -> str:
    return value.NAME if isinstance(value, _Record) else type(value).__name__


def _fields(value: Any, name: str, *wanted: str) -> list[Any]:
    """Those of a record's state."""
    if not _is(value, name) or type(value.state) is not dict:
        raise _Wrong(f"an entry must be exactly a {name}; it is {_kind(value)}")
    missing = [w for w in wanted if w not in value.state]
    if missing:
        raise _Wrong(f"a {name} lacks {', '.join(missing)}")
    return [value.state[w] for w in wanted]


def _count(value: object, what: str) -> int:
    if type(value) is not int or value < 0:  # True is an int, too
        raise _Wrong(f"{what} must be a whole number of 0 or more; it is {value!r:.40}")
    return value


def _size(value: Any) -> torch.Size:
    if not _is(value, "Size") or len(value.arguments) != 1 or type(value.arguments[0]) is not tuple:
        raise _Wrong("a size must be a torch.Size")
    return torch.Size([_count(n, "a size") for n in value.arguments[0]])


def _tensor(entry: Any) -> TensorStorageMetadata:
    properties, size, chunks = _fields(entry, "TensorStorageMetadata", "properties", "size", "chunks")
    state = properties.state if _is(properties, "TensorProperties") else None
    dtype = state[0] if type(state) is tuple and state else None
    if not (isinstance(dtype, type) and issubclass(dtype, _Record) and dtype.NAME in DTYPES):
        raise _Wrong("a tensor must have a dtype")
    if type(chunks) is not list:
        raise _Wrong("the parts of a tensor must be a list")
    parts = [_fields(c, "ChunkStorageMetadata", "offsets", "sizes") for c in chunks]
    boxes = [ChunkStorageMetadata(_size(offsets), _size(sizes)) for offsets, sizes in parts]
    whole = _size(size)
    for box in boxes:
        fits = len(box.offsets) == len(box.sizes) == len(whole)
        if not fits or any(o + s > n for o, s, n in zip(box.offsets, box.sizes, whole)):
            raise _Wrong("a part of a tensor does not lie within it")
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype.NAME)), whole, boxes)


def _place(info: Any) -> _StorageInfo:
    """Where a part lies: in a file of the same folder."""
    name, offset, length = _fields(info, "_StorageInfo", "relative_path", "offset", "length")
    if type(name) is not str or Path(name).name != name or name in ("", "..") or "\\" in name or "\0" in name:
        raise _Wrong(f"{name!r:.80} must be the plain name of a file in the folder")
    if info.state.get("transform_descriptors"):  # torch would look a decoder up by its name
        raise _Wrong("a file must not be transformed")
    return _StorageInfo(name, _count(offset, "an offset"), _count(length, "a length"))


def _index(value: Any, foreign: bool = False) -> tuple[Metadata, set[str]]:
    """The index with tensors only, and the names of all files that it speaks of.

    foreign : of another program, whose entries of bytes (random states, for example) are passed over.
    """
    entries, storage = _fields(value, "Metadata", "state_dict_metadata", "storage_data")
    if type(entries) is not dict or type(storage) is not dict or not entries:
        raise _Wrong("it lists no tensors")
    tensors: dict[str, Any] = {}
    places, files = {}, set()
    for key, entry in entries.items():
        if type(key) is not str:
            raise _Wrong("the name of a tensor must be text")
        if foreign and _is(entry, "BytesStorageMetadata"):
            continue
        if not _is(entry, "TensorStorageMetadata"):
            raise _Wrong(f"{key!r:.120} must be a tensor; it is declared as {_kind(entry)}")
        tensors[key] = _tensor(entry)
    for where, info in storage.items():
        (key,), place = _fields(where, "MetadataIndex", "fqn"), _place(info)
        files.add(place.relative_path)
        if key in tensors:
            offset = where.state.get("offset")
            places[MetadataIndex(key, None if offset is None else _size(offset))] = place
        elif type(key) is not str or key not in entries:
            raise _Wrong(f"{key!r:.120} has a place but no size")
    return Metadata(tensors, storage_data=places, storage_meta=StorageMeta()), files


def _read(folder: Path, foreign: bool = False) -> tuple[Metadata, set[str]]:
    path = folder / INDEX
    try:
        with path.open("rb") as f:
            return _index(_RecordUnpickler(f).load(), foreign)
    except Exception as error:  # a damaged pickle can raise anything
        why = str(error) if isinstance(error, _Wrong) or str(error).startswith("it ") else reason(error)
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors: {why[:300]}; use another checkpoint or write this one again"
        ) from None


def data_files(folder: Path) -> list[str]:
    """Names of the files that hold a checkpoint's tensors; `CheckpointError` unless the index is one of tensors."""
    return sorted(_read(folder)[1])


# ---- loading ------------------------------------------------------------------------------------------------------


class _Reader(FileSystemReader):
    """torch's, with the checked index in place of the pickle."""

    def __init__(self, folder: Path, foreign: bool = False):
        super().__init__(folder)
        self.index, self.files = _read(folder, foreign)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return self.index


class _Planner(MCoreLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is declared as bytes, and only tensors are loaded")


def _tensors(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    """As megatron-core's strategy loads them (`TorchDistLoadShardedStrategy.load`, 0.16), with the two above.

    torch wants a flat dict by the names in the files, megatron-core a nested one by those of modules. So for
    {"model": {"decoder.layers.0.w": place of layer 0, "decoder.layers.1.w": of layer 1}}, which are one tensor "w":

        flattened   {"w": [place of layer 0, of layer 1]}, and how to undo it: `flat`, `renamed`
        read        {"w": [tensor, tensor]}, and put back under the names of the modules
    """
    places = [t for t in nested_values(wanted) if isinstance(t, ShardedTensor)]
    state, flat, renamed = _replace_state_dict_keys_with_sharded_keys(wanted)
    tensors = mcore_to_pyt_state_dict(state, True)
    load_torch_dist(tensors, storage_reader=_Reader(folder), planner=_Planner(shapes_validation_sharded_tensors=places))
    unwrapped = {k: _unwrap_pyt_sharded_tensor(v) for k, v in tensors.items()}
    loaded = _replace_sharded_keys_with_state_dict_keys(unwrapped, flat, renamed)
    _restore_dict_types(loaded, wanted)
    return loaded


def _common(folder: Path) -> dict[str, Any]:
    """Values that all ranks share, in `common.pt`: numbers, text, tensors."""
    path = folder / COMMON
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or holds more than numbers: {reason(error)}") from None
    if type(value) is not dict:
        raise CheckpointError(f"{path} must hold a dict; it holds {type(value).__name__}")
    return value


def without_objects(state: dict[str, Any]) -> dict[str, Any]:
    """A module's sharded state less the entries that would be pickled (`_extra_state`, of which ours has none)."""
    return {k: v for k, v in state.items() if not isinstance(v, ShardedObject)}


def load_tensors(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `state` (sharded tensors) asks for, from a checkpoint folder, in this layout; runs no code from it.

    The steps of `megatron.core.dist_checkpointing.load`, which from 0.18 on unpickles the common values itself.
    """
    found = _common(folder)
    wanted, local, factories = load_preprocess(state)
    merge(found, local)
    try:
        merge(found, _tensors(extract_sharded_base(wanted)[0], folder))
    except CheckpointException as error:  # of all ranks, with a traceback each
        first, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{folder} is damaged or of another model: {reason(first)}; use another") from None
    apply_factory_merges(found, factories)
    return found


class _Part(DefaultLoadPlanner):
    """A part of one tensor: megatron-core's planner takes all layers of a weight, which are one tensor, or none.

    For rows 3 to 5 of layer 1 of a weight [layers, 6, 4]: key "decoder.layers.w", box (1, 3, 0) of size (1, 3, 4), and
    a read for each stored chunk that it overlaps. torch calls `create_local_plan` once, then `lookup_tensor` for each.
    """

    def __init__(self, place: ShardedTensor):
        super().__init__()
        self.place = place

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        key, shape = self.place.key, tuple(self.place.global_shape)
        whole = self.metadata.state_dict_metadata.get(key)
        if not isinstance(whole, TensorStorageMetadata) or tuple(whole.size) != shape:
            raise CheckpointError(f"{key} is missing or has another shape than {list(shape)}")
        part = self.state_dict[key]
        box = ChunkStorageMetadata(torch.Size(self.place.global_offset), part.shape)
        found = create_read_items_for_chunk_list(key, whole, [box])
        if sum(math.prod(item.lengths) for item in found) != part.numel():
            raise CheckpointError(f"{key} is not all there")
        return LoadPlan(found)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn]


class PartReader:
    """Parts of a checkpoint folder's tensors, one at a time and in one process; runs no code from it."""

    def __init__(self, folder: Path):
        self.folder, self.reader = folder, _Reader(folder)
        _common(folder)  # for its refusals: half a checkpoint is none

    def __call__(self, place: ShardedTensor) -> torch.Tensor:
        """What `place` describes, in float32 [place.local_shape]."""
        # the axes that megatron-core puts in front (layers) are of size 1, and away again below
        part = torch.empty((1,) * place.prepend_axis_num + tuple(place.local_shape))
        _load_alone({place.key: part}, self.folder, self.reader, _Part(place))
        return part.view(place.local_shape)


def load_foreign(folder: Path) -> dict[str, torch.Tensor]:
    """All whole tensors of a checkpoint folder of another program, less its optimizer's; runs no code from it."""
    reader = _Reader(folder, foreign=True)
    entries: dict[str, Any] = reader.index.state_dict_metadata
    names = [name for name in entries if not name.startswith(("optimizer.", "chained_"))]
    # A size is a number that anybody can write: no memory is taken for more than the files have.
    held = sum(p.stat().st_size if p.is_file() else -math.inf for p in (folder / f for f in reader.files))
    if sum(math.prod(e.size) * e.properties.dtype.itemsize for e in entries.values()) > held:
        raise CheckpointError(f"{folder / INDEX} lists more than is there: a file is missing, short or no regular one")
    state: dict[str, Any] = {n: torch.empty(entries[n].size, dtype=entries[n].properties.dtype) for n in names}
    _load_alone(state, folder, reader, _Planner(shapes_validation_sharded_tensors=[]))
    return state


def _load_alone(state: dict[str, Any], folder: Path, reader: _Reader, planner: DefaultLoadPlanner) -> None:
    """Fill the tensors of `state`, in one process."""
    try:
        with warnings.catch_warnings(action="ignore"):  # that it is one process
            load_torch_dist(state, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        first, _ = next(iter(error.failures.values()))
        raise CheckpointError(f"{folder} is damaged or of another model: {reason(first)}; use another") from None
