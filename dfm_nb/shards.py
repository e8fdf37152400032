"""WebDataset shards: writing them whole or not at all, reading them without running code, and Energon's metadata.

A sample is three tar members: `<key>.pth` (torch.save of a bf16 latent [1, 16, T, H, W]), `<key>.pickle` (a pickled bf16 tensor
[1, L, D]) and `<key>.json`. A folder of shards:

    rank0-000000.tar ...   .nv-meta/ (Energon)   manifest.json   text_empty.safetensors   tokenizer.safetensors   .dfm/ (records)

Guarantees: a tar has its final name only when it is complete and on disk; equal samples give equal bytes; reading executes nothing from
a file: unknown names in a pickle are refused and named.
"""

from __future__ import annotations

import collections
import hashlib
import io
import json
import os
import pickle
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from dfm_nb.records import EncodedClip, SampleError
from dfm_nb.runs import write_atomically

PARTS = ("pth", "pickle", "json")
RECORDS = ".dfm"


# ---- parts --------------------------------------------------------------------------------------------------------


class _StablePickler(pickle.Pickler):
    """Pickles tensors so that equal ones give equal bytes: torch's own form names a storage by its address."""

    def reducer_override(self, value):
        if isinstance(value, torch.storage.TypedStorage | torch.UntypedStorage):
            buffer = io.BytesIO()
            torch.save(value, buffer)  # the zip form has no addresses; torch.storage._load_from_bytes reads both
            return torch.storage._load_from_bytes, (buffer.getvalue(),)
        return NotImplemented


def _pickled(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    _StablePickler(buffer, protocol=4).dump(tensor)
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


class _TensorUnpickler(pickle.Unpickler):
    """Knows only what a pickled tensor is made of; the storage inside goes through torch's weights-only loader."""

    NAMES = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
        ("torch.storage", "_load_from_bytes"): _load_tensor,
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
    """A sample from its members. Text [L, D] is taken as [1, L, D], as some writers leave the batch dim out."""
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
    return EncodedClip(key, latent, text, meta)


# ---- writing ------------------------------------------------------------------------------------------------------


def write_shard(path: Path, samples: Iterable[EncodedClip]) -> tuple[str, int]:
    """Write a tar, sync it and give it its name; returns (sha256, bytes). Equal samples give equal bytes."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for clip in samples:
                for extension, data in encode_parts(clip).items():
                    member = tarfile.TarInfo(f"{clip.key}.{extension}")
                    member.size, member.mode = len(data), 0o644
                    tar.addfile(member, io.BytesIO(data))
        file.flush()
        os.fsync(file.fileno())
    digest, size = sha256(temporary), temporary.stat().st_size
    temporary.replace(path)
    sync(path.parent)
    return digest, size


def sync(path: Path) -> None:
    """Make a file's content, or the renames in a folder, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_energon_metadata(folder: Path, splits: dict[str, list[str]]) -> None:
    """`.nv-meta` as `energon prepare` makes it, without a prompt; `splits` lists the shards of train, val and test."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors import BaseWebdatasetFactory

        every = sorted(name for names in splits.values() for name in names)
        BaseWebdatasetFactory.prepare_dataset(
            EPath(str(folder)),
            every,
            split_parts_patterns=[(part, name) for part, names in splits.items() for name in names],
            workers=1,
        )
    meta = folder / ".nv-meta"
    dataset = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    write_atomically(meta / "dataset.yaml", dataset.encode())
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


# ---- reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleEntry:
    """Where a sample lies in a tar: for each part (offset, size) in bytes; and its .json, parsed."""

    key: str
    shard: Path
    parts: dict[str, tuple[int, int]]
    meta: dict

    def read(self) -> EncodedClip:
        with self.shard.open("rb") as f:
            data = {part: os.pread(f.fileno(), size, offset) for part, (offset, size) in self.parts.items()}
        return decode_sample(data, self.key)


def scan_shard(path: Path) -> list[SampleEntry]:
    """The samples of a tar, in order; reads headers and .json parts only."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(path) as tar, path.open("rb") as f:
            for member in tar:
                if member.isfile() and not Path(member.name).name.startswith("."):
                    key, _, extension = member.name.partition(".")
                    found.setdefault(key, {})[extension] = (member.offset_data, member.size)
            entries = []
            for key, parts in found.items():
                raw = os.pread(f.fileno(), parts["json"][1], parts["json"][0]) if "json" in parts else b"{}"
                try:
                    meta = json.loads(raw)
                except ValueError:
                    meta = {}
                entries.append(SampleEntry(key, path, {p: v for p, v in parts.items() if p in PARTS}, meta))
    except tarfile.TarError as error:
        raise ValueError(f"{path} is not a readable tar: {error}; write it again") from None
    return entries
