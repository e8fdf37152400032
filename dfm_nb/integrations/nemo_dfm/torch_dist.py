"""Tensors of the `torch_dist` folders that megatron-core writes, for `dfm import`; runs no code from them.

The index, `.metadata`, is a pickle. It is read by `checkpoints.exported`, and only what has the form of an index of
tensors is used. The tensors are those of `data.tensor_bytes`.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from dfm_nb.base.files import UNLIMITED, plain
from dfm_nb.checkpoints.exported import Record, read_pickle
from dfm_nb.checkpoints.tensor_files import CheckpointError, assembled, reason
from dfm_nb.data.tensor_bytes import read_saved

INDEX = ".metadata"


def _fields(value: Any, *names: str) -> list[Any]:
    """Those of a record's state."""
    state = value.state if type(value) is Record else None
    if not isinstance(state, dict) or not state.keys() >= set(names):
        raise ValueError(f"it has something else in place of an object with {', '.join(names)}")
    return [state[name] for name in names]


def _size(value: Any) -> list[int]:
    """Of a `torch.Size`."""
    (sizes,) = value.arguments if type(value) is Record and len(value.arguments) == 1 else (None,)
    if not isinstance(sizes, tuple) or not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError("it has something else in place of a size")
    return list(sizes)


def _chunk(folder: Path, info: Any) -> Tensor:
    """A part of a tensor, as torch.save wrote it into a file of the folder."""
    name, offset, length = _fields(info, "relative_path", "offset", "length")
    if type(name) is not str or Path(name).name != name:
        raise ValueError(f"{name!r:.80} must be the plain name of a file in the folder")
    path = plain(folder / name, None, UNLIMITED)
    size = path.stat().st_size
    if not all(type(n) is int and 0 <= n <= size for n in (offset, length)) or info.state.get("transform_descriptors"):
        raise ValueError(f"a part of {name} must lie in it, untransformed")
    with path.open("rb") as f:
        f.seek(offset)
        value = read_saved(f.read(length))
    if not isinstance(value, Tensor):
        raise ValueError(f"a part of {name} is no tensor")
    return value


def _tensors(folder: Path) -> dict[str, Tensor]:
    index = read_pickle(plain(folder / INDEX).read_bytes())
    entries, storage = _fields(index, "state_dict_metadata", "storage_data")
    chunks: dict[str, list[tuple[list[int], Any]]] = {}
    for where, info in storage.items():
        (name,) = _fields(where, "fqn")
        if type(name) is not str:
            raise ValueError("the name of a tensor must be text")
        # without a size it is bytes, as random states
        if "size" in (entries[name].state or ()) and not name.startswith(("optimizer.", "chained_")):
            chunks.setdefault(name, []).append((_size(*_fields(where, "offset")), info))
    out = {}
    for name, parts in chunks.items():
        read = [(offset, _chunk(folder, info)) for offset, info in parts]
        out[name] = assembled(f"{name!r:.120}", _size(*_fields(entries[name], "size")), read)
    return out


def load_foreign(folder: Path) -> dict[str, Tensor]:
    """All whole tensors of a folder of another program, less its optimizer's; CheckpointError when it is damaged."""
    try:
        return _tensors(folder)
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{folder / INDEX} is damaged or holds more than tensors: {reason(error)}") from None
