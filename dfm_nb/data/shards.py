"""WebDataset shards: writing them whole or not at all, reading them without running code, and Energon's metadata.

A sample is three tar members: `<key>.pth` (torch.save of a bf16 latent [1, 16, T, H, W]), `<key>.pickle` (a pickled
bf16 tensor [1, L, D]) and `<key>.json`. A folder of shards:

    rank0-000000.tar ...   manifest.json   text_empty.safetensors   tokenizer.safetensors
    .nv-meta/ (Energon)    .dfm/ (records of the preparation)

A tar has its final name only when it is complete and on disk, and equal samples give equal bytes. Reading executes
nothing from a file: unknown names in a pickle are refused and named.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import os
import pickle
import shutil
import tarfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dfm_nb.base.files import fsync_replace, sha256, sync, write_atomically
from dfm_nb.base.records import EncodedClip, SampleError

PARTS = ("pth", "pickle", "json")
RECORDS = ".dfm"


# ---- parts --------------------------------------------------------------------------------------------------------


_PurePickler: Any = pickle._Pickler  # the one written in Python: its steps can be replaced; typeshed leaves them out


class _TensorPickler(_PurePickler):
    """Pickles tensors so that equal ones give equal bytes: torch's own form names a storage by its address."""

    def reducer_override(self, value: object) -> object:
        if isinstance(value, torch.storage.TypedStorage | torch.UntypedStorage):
            buffer = io.BytesIO()
            torch.save(value, buffer)  # the zip form has no addresses; torch.storage._load_from_bytes reads both
            return torch.storage._load_from_bytes, (buffer.getvalue(),)
        return NotImplemented

    def save_global(self, obj: object, name: str | None = None) -> None:
        if obj is not torch.storage._load_from_bytes:
            return super().save_global(obj, name)
        # by torch's own name: megatron-core 0.19 puts a function of its own in this place, which readers may not have
        self.save("torch.storage")
        self.save("_load_from_bytes")
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    dispatch = {**_PurePickler.dispatch, types.FunctionType: save_global}


def _pickled(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=4).dump(tensor)
    return buffer.getvalue()


def encode_parts(clip: EncodedClip) -> dict[str, bytes]:
    """The bytes of a sample's members, by extension."""
    latent = io.BytesIO()
    torch.save(clip.latent.bfloat16().contiguous().clone(), latent)
    return {
        "pth": latent.getvalue(),
        "pickle": _pickled(clip.text_emb.bfloat16().contiguous().clone()),
        "json": json.dumps(clip.meta, ensure_ascii=False, sort_keys=True).encode(),
    }


def _load_tensor(data: bytes) -> object:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class _RebuildTensor:
    """Stands for torch's function: a pickle can set attributes of what it names, and this has none that can be set."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> torch.Tensor:
        return torch._utils._rebuild_tensor_v2(*arguments)


class _LoadTensor:
    """Stands for torch's function, by its weights-only loader."""

    __slots__ = ()

    def __call__(self, data: bytes) -> object:
        return _load_tensor(data)


class _TensorUnpickler(pickle.Unpickler):
    """Knows only what a pickled tensor is made of; the storage inside goes through torch's weights-only loader."""

    NAMES = {
        ("collections", "OrderedDict"): collections.OrderedDict,  # a built-in class: its attributes cannot be set
        ("torch._utils", "_rebuild_tensor_v2"): _RebuildTensor(),
        ("torch.storage", "_load_from_bytes"): _LoadTensor(),
        ("megatron.core.safe_globals", "safe_load_from_bytes"): _LoadTensor(),  # the same in 0.19
    }

    def find_class(self, module, name):
        try:
            return self.NAMES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which a tensor does not need") from None


def _refuse(key: str, part: str, error: Exception) -> SampleError:
    why = str(error).split("\n")[0][:200]
    return SampleError("unsafe_or_damaged_part", f"sample {key}: its .{part} was refused: {why}")


def decode_pth(data: bytes, key: str = "?") -> torch.Tensor:
    """Tensor of a `.pth` part; SampleError when it is anything but tensors."""
    try:
        value = _load_tensor(data)
    except Exception as error:
        raise _refuse(key, "pth", error) from None
    if not isinstance(value, torch.Tensor):
        raise SampleError("not_a_tensor", f"sample {key}: its .pth holds {type(value).__name__}, not a tensor")
    return value


def decode_pickle(data: bytes, key: str = "?") -> torch.Tensor:
    """Tensor of a `.pickle` part; SampleError when the pickle names anything a tensor does not need."""
    try:
        value = _TensorUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise _refuse(key, "pickle", error) from None
    if not isinstance(value, torch.Tensor):
        raise SampleError("not_a_tensor", f"sample {key}: its .pickle holds {type(value).__name__}, not a tensor")
    return value


def decode_sample(parts: dict[str, bytes], key: str) -> EncodedClip:
    """A sample from its members, without running code from them; SampleError names what is wrong with it.

    Text [L, D] is taken as [1, L, D], as some writers leave the batch dim out. Padding is taken off: what lies beyond
    the .json's `text_tokens` (see `dfm prepare --pad-text-tokens`), or rows of zeros at the end where it has none.
    """
    missing = {"pth", "pickle"} - parts.keys()
    if missing:
        raise SampleError("missing_part", f"sample {key} has no .{' and no .'.join(sorted(missing))}")
    latent, text = decode_pth(parts["pth"], key), decode_pickle(parts["pickle"], key)
    text = text[None] if text.ndim == 2 else text
    if latent.ndim != 5 or latent.shape[0] != 1 or text.ndim != 3 or text.shape[0] != 1:
        raise SampleError(
            "wrong_shape",
            f"sample {key}: a latent must be [1, C, T, H, W] and a text embedding [1, L, D]; "
            f"got {list(latent.shape)} and {list(text.shape)}",
        )
    try:
        meta = json.loads(parts.get("json", b"{}"))
    except ValueError as error:
        raise SampleError("unreadable_json", f"sample {key}: its .json is not JSON: {error}") from None
    if not isinstance(meta, dict):
        raise SampleError("unreadable_json", f"sample {key}: its .json must be an object; it is {type(meta).__name__}")
    tokens = meta.get("text_tokens")
    if tokens is None:  # NeMo DFM pads to 512 rows; a prompt is encoded at its own length, so training takes that too
        filled = text[0].any(-1).nonzero()
        tokens = int(filled[-1]) + 1 if len(filled) else 1
    if isinstance(tokens, int) and 0 < tokens < text.shape[1]:
        text = text[:, :tokens]
    return EncodedClip(key, latent, text.bfloat16(), meta)


# ---- writing ------------------------------------------------------------------------------------------------------


class ShardWriter:
    """A tar under a temporary name that `close` syncs and gives its own; whatever ends before that leaves no shard.

    The temporary name holds the process id, so that two processes that write the same shard do not meet.
    """

    def __init__(self, path: Path):
        self.path, self.samples = path, 0
        self.temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._file = self.temporary.open("wb")
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)

    def add(self, clip: EncodedClip) -> None:
        for extension, data in encode_parts(clip).items():
            member = tarfile.TarInfo(f"{clip.key}.{extension}")  # no times and no owner: equal samples, equal bytes
            member.size, member.mode = len(data), 0o644
            self._tar.addfile(member, io.BytesIO(data))
        self.samples += 1

    def close(self) -> tuple[str, int]:
        """(sha256, bytes) of the finished shard."""
        self._tar.close()
        self._file.close()
        digest, size = sha256(self.temporary), self.temporary.stat().st_size
        fsync_replace(self.temporary, self.path)
        sync(self.path.parent)
        return digest, size

    def abort(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self.temporary.unlink(missing_ok=True)


def write_energon_metadata(folder: Path, splits: dict[str, list[str]]) -> None:
    """`.nv-meta` as `energon prepare` makes it, without a prompt; `splits` lists the shards of train, val and test."""
    import warnings

    shutil.rmtree(folder / ".nv-meta", ignore_errors=True)  # a kill may have left half of it
    said = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said):
        warnings.simplefilter("ignore")
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors import BaseWebdatasetFactory

        every = sorted(name for names in splits.values() for name in names)
        try:
            BaseWebdatasetFactory.prepare_dataset(
                EPath(str(folder.absolute())),
                every,
                split_parts_patterns=[(part, name) for part, names in splits.items() for name in names],
                workers=1,
            )
        except SystemExit:  # Energon's way to report, after printing why
            why = " ".join(said.getvalue().split())
            raise ValueError(f"Energon refuses the shards in {folder}: {why[:300]}") from None
    meta = folder / ".nv-meta"
    # `energon info` of 7.4.1 wants a sample type, which a crude data set's own configuration must not have:
    # energon info DIR --dataset-config info.yaml
    info = "sample_type:\n  __module__: megatron.energon\n  __class__: CrudeSample\n"
    write_atomically(meta / "info.yaml", info.encode())
    lines = ["exclude: []", "split_parts:"]
    for part in ("train", "val", "test"):
        names = sorted(splits.get(part, []))
        lines.append(f"  {part}:" + ("" if names else " []"))
        lines += [f"  - {name}" for name in names]
    write_atomically(meta / "split.yaml", ("\n".join(lines) + "\n").encode())
    dataset = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    write_atomically(meta / "dataset.yaml", dataset.encode())  # last: `has_energon_metadata` asks for it


def has_energon_metadata(folder: Path) -> bool:
    """Whether `.nv-meta` is there and whole, ours or of `energon prepare`."""
    return (folder / ".nv-meta" / "dataset.yaml").is_file()


# ---- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleEntry:
    """Where a sample lies in a tar: for each part (offset, size) in bytes; and its .json, parsed."""

    key: str
    shard: Path
    parts: dict[str, tuple[int, int]]
    meta: dict

    def read(self) -> EncodedClip:
        """Decode the sample; SampleError when a part is missing, damaged or unsafe."""
        return decode_sample(read_parts(self), self.key)


def read_parts(entry: SampleEntry) -> dict[str, bytes]:
    """The bytes of a sample's parts, by extension."""
    with entry.shard.open("rb") as f:
        return {part: os.pread(f.fileno(), size, offset) for part, (offset, size) in entry.parts.items()}


def _key_and_extension(name: str) -> tuple[str, str]:
    """As WebDataset splits a member's name: at the first dot after the last slash."""
    folder, slash, leaf = name.rpartition("/")
    stem, _, extension = leaf.partition(".")
    return folder + slash + stem, extension


def find_shards(place: Path) -> list[Path]:
    """The tars of a folder and its sub-folders, or the one that was named."""
    if place.is_file():
        return [place]
    tars = sorted(p for p in place.rglob("*.tar") if p.is_file()) if place.is_dir() else []
    if not tars:
        raise FileNotFoundError(f"{place} holds no .tar shards; name a folder that dfm prepare or another writer made")
    return tars


def scan_shard(path: Path) -> list[SampleEntry]:
    """The samples of a tar, in order; reads headers and .json parts only. ValueError when the tar is cut or is none."""
    found: list[tuple[str, dict[str, tuple[int, int]]]] = []
    try:
        with tarfile.open(path) as tar:
            if tar.fileobj is None or not isinstance(tar.fileobj, io.BufferedReader):
                raise tarfile.TarError("it is compressed; unpack it, as samples are read in place")
            size = path.stat().st_size
            for member in tar:
                key, extension = _key_and_extension(member.name)
                if not member.isfile() or not extension or key.rpartition("/")[2] == "":
                    continue
                if member.offset_data + member.size > size:
                    raise tarfile.TarError(f"it is cut off in the middle of {member.name}")
                if not found or found[-1][0] != key or extension in found[-1][1]:
                    found.append((key, {}))
                found[-1][1][extension] = (member.offset_data, member.size)
    except tarfile.TarError as error:
        raise ValueError(f"{path} is not a readable tar: {error}; write it again") from None
    with path.open("rb") as f:
        return [SampleEntry(key, path, *_described(f.fileno(), parts)) for key, parts in found]


def _described(fd: int, parts: dict[str, tuple[int, int]]) -> tuple[dict[str, tuple[int, int]], dict]:
    """The parts we know, and the .json."""
    offset, size = parts.get("json", (0, 0))
    return {p: v for p, v in parts.items() if p in PARTS}, parse_meta(os.pread(fd, size, offset))


def parse_meta(data: bytes) -> dict:
    """A .json part; {} when it is missing, damaged or no object (`decode_sample` says what is wrong)."""
    try:
        meta = json.loads(data or b"{}")
    except ValueError:
        return {}
    return meta if isinstance(meta, dict) else {}


# ---- records ------------------------------------------------------------------------------------------------------


def record_path(folder: Path, name: str) -> Path:
    return folder / RECORDS / f"{name}.json"


def read_record(folder: Path, name: str) -> dict | None:
    """What is known of a shard; None when it is not finished."""
    path = record_path(folder, name)
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    tar = folder / name
    whole = record["samples"] == 0 or (tar.is_file() and tar.stat().st_size == record["bytes"])
    return record if whole else None
