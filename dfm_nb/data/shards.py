"""WebDataset shards: written atomically, read without running code; and Energon's metadata.

A sample is three tar members: `<key>.pth` (torch.save of a bf16 latent [1, 16, T, H, W]), `<key>.pickle` (a pickled
bf16 tensor [1, L, D]) and `<key>.json`. With further captions there is a fourth, `<key>.more.pickle`: their embeddings
concatenated, [1, L1 + L2 + ..., D], with the lengths `more_text_tokens` in the .json. With given pictures or clips
there is `<key>.given.pickle`: their latents, each flattened, end to end, [1, C, N], with their sizes [T, H, W] as
`given_shapes` in the .json. A folder of shards:

    rank0-000000.tar ...   manifest.json   text_empty.safetensors   tokenizer.safetensors
    .nv-meta/ (Energon)    .dfm/ (records of the preparation)

A tar gets its final name when it is complete and on disk. Equal samples give equal bytes. Reading runs no code from a
file: unknown names in a pickle are refused and reported.
"""

import contextlib
import io
import itertools
import json
import math
import pickle
import re
import tarfile
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import pydantic
import torch
import yaml
from pydantic_core import from_json
from torch import Tensor

from dfm_nb.base.argv import imported_without
from dfm_nb.base.files import (
    ANYWHERE,
    UNLIMITED,
    is_plain,
    lies_inside,
    naming,
    plain,
    read_json,
    sha256,
    sync,
    temporary_of,
    write_atomically,
)
from dfm_nb.base.geometry import Size
from dfm_nb.base.limits import MOST_SHARDS, MOST_TEXT
from dfm_nb.base.records import Content, EncodedClip, SampleError
from dfm_nb.data import tensor_bytes

PARTS = ("pth", "pickle", "json")
"""Of a sample, in the order in which they are written. `_crc32` covers them, `MORE` and `GIVEN`; no other is read."""
MORE = "more.pickle"
"""The part with further captions, if a sample has any: readers that support one caption skip it."""
GIVEN = "given.pickle"
"""The part with given pictures, likewise."""
SPLITS = ("train", "val", "test")
Splits = dict[str, list[str]]
"""The names of each split's shards."""
RECORDS = ".dfm"
NV_META = [f".nv-meta/{n}" for n in ".info.json index.sqlite index.uuid info.yaml split.yaml dataset.yaml".split()]
"""What `write_energon_metadata` makes."""
UNUSED_BY_ENERGON = {"rfc3987_syntax": None}
"""A grammar of IRIs, which its storage client compiles by way of jsonschema: 0.8 s."""

CHECKSUM = "crc32"
"""Of all parts, in the .json; samples of other writers have none."""


# ---- parts ---------------------------------------------------------------------------------------


# the one written in Python: its steps can be replaced; typeshed leaves them out
_PurePickler: Any = pickle._Pickler


def _load_from_bytes(content: bytes) -> None:
    """Pickled under torch's name, because megatron-core 0.19 replaces torch's function by one that readers may lack."""


class _TensorPickler(_PurePickler):
    """Pickle tensors so that equal ones give equal bytes: torch's own format uses the storage's address as its name."""

    def reducer_override(self, value: object) -> object:
        if isinstance(value, torch.storage.TypedStorage | torch.UntypedStorage):
            buffer = io.BytesIO()
            # the zip form has no addresses; torch's function for its own form reads both
            torch.save(value, buffer)
            return _load_from_bytes, (buffer.getvalue(),)
        return NotImplemented

    def save(self, obj: object, *given: Any) -> None:
        if obj is not _load_from_bytes:
            return super().save(obj, *given)
        self.save("torch.storage")
        self.save("_load_from_bytes")
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)


def _pickled(tensor: Tensor) -> bytes:
    buffer = io.BytesIO()
    _TensorPickler(buffer, protocol=4).dump(tensor.bfloat16().contiguous().clone())
    return buffer.getvalue()


def encode_parts(clip: EncodedClip) -> dict[str, bytes]:
    """The bytes of a sample's members, by extension."""
    buffer = io.BytesIO()
    torch.save(clip.latent.bfloat16().contiguous().clone(), buffer)
    # written in this order
    parts = {"pth": buffer.getvalue(), "pickle": _pickled(clip.text_emb), "json": b""}
    if clip.more_text:
        parts[MORE] = _pickled(torch.cat(clip.more_text, 1))
    if clip.given:
        parts[GIVEN] = _pickled(torch.cat([z.flatten(2) for z in clip.given], 2))
    meta = clip.meta | {CHECKSUM: _crc32(parts, clip.meta)}
    parts["json"] = json.dumps(meta, ensure_ascii=False, sort_keys=True).encode()
    return parts


def _crc32(parts: dict[str, bytes], meta: dict) -> int:
    """Checksum of a sample's parts; the .json without the checksum itself."""
    crc = 0
    for part in ("pth", "pickle", MORE, GIVEN):
        crc = zlib.crc32(parts.get(part, b""), crc)
    said = json.dumps(meta, ensure_ascii=False, sort_keys=True)
    return zlib.crc32(said.encode("utf-8", "surrogatepass"), crc)


def decode_tensor(part: str, data: bytes | None, key: str = "?") -> Tensor:
    """Tensor of a `.pth` or `.pickle` part; SampleError if it is missing or not a tensor of floats."""
    if not data:
        raise SampleError("missing_part", f"sample {key} has no .{part}")
    try:
        value = tensor_bytes.read_saved(data) if part == "pth" else tensor_bytes.read_pickle(data)
    except Exception as error:  # damaged bytes can raise anything
        why = str(error).split("\n")[0][:200] or type(error).__name__
        raise SampleError("unsafe_or_damaged_part", f"sample {key}: its .{part} was refused: {why}") from None
    if not isinstance(value, Tensor):
        raise SampleError("not_a_tensor", f"sample {key}: its .{part} holds {type(value).__name__}, not a tensor")
    return value


class Fits(NamedTuple):
    """Required sizes of a sample. latent: channels, grid (T, H, W); text: width; given: voxels. None: unknown."""

    channels: int | None = None
    text_width: int | None = None
    grid: Size | None = None
    given: int | None = None


def decode_sample(parts: dict[str, bytes], key: str, fits: Fits | None = None) -> EncodedClip:
    """Decode a sample from its members without running code; SampleError says what is wrong with it.

    Latents [C, T, H, W] and text [L, D] get a batch dim of 1, which Megatron-Bridge's Wan script omits. Padding is
    removed: rows beyond the .json's `text_tokens` (see `dfm prepare --pad-text-tokens`), or, without it, trailing rows
    of zeros.

    Parameters
    ----------
    fits : what is known of the data set's samples.
    """
    meta = decode_meta(parts.get("json"), key)
    checksum = meta.pop(CHECKSUM, None)
    latent = decode_tensor("pth", parts.get("pth"), key)
    text = decode_tensor("pickle", parts.get("pickle"), key)
    latent = latent[None] if latent.ndim == 4 else latent
    text = text[None] if text.ndim == 2 else text
    if (latent.ndim, text.ndim, *latent.shape[:1], *text.shape[:1]) != (5, 3, 1, 1):
        said = f"sample {key} must have shapes [1, C, T, H, W] and [1, L, D]; it has {[*latent.shape]}, {[*text.shape]}"
        raise SampleError("wrong_shape", said)
    tokens = meta.get("text_tokens")
    # NeMo DFM pads to 512 rows; dropped here, because generation does not pad a prompt
    if tokens is None:
        filled = text[0].any(-1).nonzero()
        tokens = int(filled[-1]) + 1 if len(filled) else 1
    if not 0 < tokens <= text.shape[1]:
        raise SampleError("wrong_text", f"sample {key} has {text.shape[1]} text tokens and says {tokens} in its .json")
    clip = EncodedClip(key, latent, text[:, :tokens].bfloat16(), meta)
    lengths = meta.get("more_text_tokens") or []
    clip.more_text = list(_pieces(parts, MORE, key, lengths, [1, sum(lengths), text.shape[2]], 1))
    shapes = meta.get("given_shapes") or []
    sizes = list(map(math.prod, shapes))
    flat = _pieces(parts, GIVEN, key, sizes, [1, latent.shape[1], sum(sizes)], 2)
    clip.given = [z.unflatten(2, shape) for z, shape in zip(flat, shapes)]
    _check(clip, fits or Fits())
    if checksum is not None and checksum != _crc32(parts, meta):
        raise SampleError("damaged", f"sample {key} has changed since it was written: its checksum does not match")
    return clip


def _pieces(parts: dict[str, bytes], part: str, key: str, sizes: list[int], shape: list[int], dim: int) -> Any:
    """The tensors of these sizes that a part of this shape has end to end along a dim; () where the sample has none."""
    if not (sizes or parts.get(part)):
        return ()
    joined = decode_tensor(part, parts.get(part), key)
    if not sizes or list(joined.shape) != shape:
        said = f"sample {key} has a .{part} of {list(joined.shape)} where its .json says {shape}"
        raise SampleError("wrong_shape", said)
    return joined.bfloat16().split(sizes, dim)


# ---- the validator -------------------------------------------------------------------------------

LATENT_LIMIT = 1e3
"""NeMo DFM's task encoder passes over samples beyond it, too."""

TEXT_LIMIT = 1e5
"""A damaged exponent is beyond it; no encoder's states come near."""


class Form(pydantic.BaseModel, strict=True):
    """The keys of a stored JSON object that are read, with their types; others are not looked at."""

    @classmethod
    def fault(cls, value: object) -> str:
        """The first key of an object that is missing or of another type, `drops.0.key: why`; "" if there is none."""
        try:
            cls.model_validate(value)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        return ""


class Meta(Form):
    """The keys of a .json that are read; each may be missing or null."""

    caption: str | None = None
    more_captions: list[str] | None = None
    fps: Annotated[float, pydantic.Field(ge=1e-4, le=1e6)] | None = None
    text_tokens: int | None = None
    more_text_tokens: list[pydantic.PositiveInt] | None = None
    num_frames: int | None = None
    image_height: int | None = None
    image_width: int | None = None
    latent_shape: Annotated[list[pydantic.PositiveInt], pydantic.Field(min_length=3, max_length=5)] | None = None
    given_shapes: list[Annotated[list[pydantic.PositiveInt], pydantic.Field(min_length=3, max_length=3)]] | None = None
    attributes: dict | None = None
    crc32: int | None = None


def decode_meta(data: bytes | None, key: str) -> dict:
    """A .json part, {} if there is none; SampleError if it is not an object, or a value in use has another type."""
    data = data or b"{}"
    try:
        if len(data) > MOST_TEXT:
            raise ValueError(f"it has {len(data)} bytes; {MOST_TEXT} is the most")
        # pydantic refuses a byte order mark, which others may write
        meta = from_json(data.decode(json.detect_encoding(data)))
        fault = Meta.fault(meta)
    except ValueError as error:
        fault = str(error)
    if fault:
        raise SampleError("wrong_json", f"sample {key}: its .json cannot be used: {fault[:200]}")
    return meta


def _check(clip: EncodedClip, fits: Fits) -> None:
    """SampleError if a decoded sample cannot be trained on."""
    key = clip.key
    _, channels, *grid = clip.latent.shape
    stated = clip.meta.get("latent_shape")
    if 0 in clip.latent.shape or 0 in clip.text_emb.shape:
        said = f"sample {key} is empty: {list(clip.latent.shape)} and {list(clip.text_emb.shape)}"
        raise SampleError("wrong_shape", said)
    if stated is not None and stated != list(clip.latent.shape)[-len(stated) :]:
        raise SampleError(
            "wrong_shape", f"sample {key} has a latent of {[channels, *grid]} where its .json says {stated}"
        )
    found = (channels, clip.text_emb.shape[2], tuple(grid), sum(z[0, 0].numel() for z in clip.given))
    for name, wanted, own in zip(Fits._fields, fits, found):
        if wanted not in (None, own):
            said = f"sample {key} must have {name.replace('_', ' ')} {wanted} as the data set; it has {own}"
            raise SampleError(f"other_{name}", said)
    for latent in (clip.latent, *clip.given):
        _check_numbers(latent, LATENT_LIMIT, f"sample {key} holds NaN or Inf in its latent")
    for text in (clip.text_emb, *clip.more_text):
        _check_numbers(text, TEXT_LIMIT, f"sample {key} holds NaN or Inf in its text")


def _check_numbers(tensor: Tensor, limit: float, fault: str) -> None:
    low, high = torch.aminmax(tensor)
    if not (-limit <= low.item() and high.item() <= limit):  # NaN compares as False
        raise SampleError("not_finite", f"{fault}, or numbers beyond {limit:g}")


# ---- writing -------------------------------------------------------------------------------------


class ShardWriter:
    """A tar under a temporary name; `close` syncs and renames it. A process that ends earlier leaves no shard.

    Two processes that write the same shard use different temporary names.
    """

    def __init__(self, path: Path):
        self.path = path
        self.samples = 0
        self.temporary = temporary_of(path)
        self._file = self.temporary.open("xb")
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)

    def add(self, clip: EncodedClip) -> None:
        for extension, data in encode_parts(clip).items():
            # no times and no owner: equal samples, equal bytes
            member = tarfile.TarInfo(f"{clip.key}.{extension}")
            member.size = len(data)
            member.mode = 0o644
            with naming(self.path):
                self._tar.addfile(member, io.BytesIO(data))
        self.samples += 1

    def close(self) -> tuple[str | None, int]:
        """(sha256, bytes) of the finished shard; without samples it is no tar, and one of before is removed."""
        with naming(self.path):
            self._tar.close()
            self._file.close()
            sync(self.temporary)
        if not self.samples:
            self.abort()
            self.path.unlink(missing_ok=True)
            self.path.with_name(f"{self.path.name}.idx").unlink(missing_ok=True)  # Energon's
            return None, 0
        digest = sha256(self.temporary)
        size = self.temporary.stat().st_size
        self.temporary.replace(self.path)
        sync(self.path.parent)
        return digest, size

    def abort(self) -> None:
        """Leave nothing unfinished behind."""
        # on a full disk, closing fails because buffered data cannot be written
        with contextlib.suppress(OSError):
            self._file.close()
        self.temporary.unlink(missing_ok=True)


def write_energon_metadata(folder: Path, splits: Splits) -> None:
    """`.nv-meta` and the index of each tar, as `energon prepare` writes them; `splits`: shards of train, val and test.

    Raises
    ------
    ValueError : two samples have the same key.
    """
    # its own writers; its public API forks, and skips what it cannot write
    with imported_without(UNUSED_BY_ENERGON):
        from megatron.energon import __version__
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.webdataset.indexing import DuplicateSampleKeyError, SqliteIndexWriter
        from megatron.energon.flavors.webdataset.itar import TarIndexWriter
        from megatron.energon.flavors.webdataset.prepare import IndexSample, IndexSamplePart

    for name in NV_META:  # a kill may have left some of them
        (folder / name).unlink(missing_ok=True)
    counts = dict.fromkeys(sorted(itertools.chain(*splits.values())), 0)
    with SqliteIndexWriter(EPath(str(folder.absolute() / ".nv-meta" / "index.sqlite"))) as index:
        for number, name in enumerate(counts):
            samples = list[IndexSample]()
            parts = []
            tar = folder.absolute() / name
            end = 0
            # Energon would write through a link
            tar.with_name(f"{name}.idx.tmp").unlink(missing_ok=True)
            with tar.open("rb") as file, TarIndexWriter(EPath(str(tar))) as offsets:
                for key, extension, member in _members(file, whole=True):
                    if not samples or samples[-1].sample_key != key:
                        place = {"tar_file_id": number, "sample_index": len(samples)}
                        samples.append(IndexSample(**place, sample_key=key, byte_offset=member.offset, byte_size=0))
                        offsets.append(member.offset)
                    bytes_of = {"content_byte_offset": member.offset_data, "content_byte_size": member.size}
                    parts.append(IndexSamplePart(**place, part_name=extension, **bytes_of))
                    end = _end(member)
                    samples[-1].byte_size = end - samples[-1].byte_offset
                offsets.append(end)
            try:
                index.append_samples(samples)
            except DuplicateSampleKeyError as error:
                raise ValueError(f"{folder} must have each key once; {error.sample_key} occurs again") from None
            index.append_parts(parts)
            counts[name] = len(samples)
    # `energon info` of 7.4.1 wants a sample type, which a crude data set's own configuration must
    # not have: energon info DIR --dataset-config info.yaml
    contents = {
        ".info.json": json.dumps({"energon_version": __version__, "shard_counts": counts}),
        "index.uuid": str(uuid.uuid4()),
        "info.yaml": {"sample_type": {"__module__": "megatron.energon", "__class__": "CrudeSample"}},
        "split.yaml": {"exclude": [], "split_parts": {part: sorted(splits.get(part, [])) for part in SPLITS}},
        # last: `has_energon_metadata` asks for it
        "dataset.yaml": {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"},
    }
    for name, content in contents.items():
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        write_atomically(folder / ".nv-meta" / name, text.encode())


def has_energon_metadata(folder: Path) -> bool:
    """Whether `.nv-meta` exists and is complete, from us or from `energon prepare`."""
    return (folder / ".nv-meta" / "dataset.yaml").is_file()


def how_to_adopt(path: str | Path) -> str:
    """The end of a message about a folder of third-party shards."""
    return f"`dfm adopt {path} --tokenizer NAME --text-encoder NAME` completes it"


def splits_of(folder: Path) -> Splits:
    """The shards of each split, in Energon's order; ValueError if there is no `.nv-meta`, or it is damaged.

    Energon would open pipes there, and what a pattern such as `a-{0..999999999}.tar` stands for.
    """
    with imported_without(UNUSED_BY_ENERGON):
        from megatron.energon.eyaml import load_yaml

    meta = folder / ".nv-meta"
    try:
        about = load_yaml(plain(meta / "split.yaml", folder).read_bytes())
        excluded = _expanded(about.get("exclude", ()))
        splits = {split: _expanded(about["split_parts"].get(split, ())) for split in SPLITS}
    except Exception as error:  # of YAML and of its types
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(f"{meta} is missing or damaged ({why}); {how_to_adopt(folder)}") from None
    for name in itertools.chain(*splits.values()):
        if not lies_inside(name):
            raise ValueError(f"{meta} must list shards inside {folder}; it lists {name!r:.80}; remove it")
    for names in splits.values():
        for name in excluded:
            names.pop(name, None)
    return {split: list(names) for split, names in splits.items()}


def _expanded(patterns: Sequence[str]) -> dict[str, None]:
    """The names of patterns such as `a-{000..127}.tar`, in order."""
    from braceexpand import braceexpand

    for pattern in patterns:  # ranges and nested braces are in memory at once
        if re.search(r"{[^}]*({|[1-9]\d{6}\d*\.\.|\.\.0*[1-9]\d{6})", pattern):
            raise ValueError(f"{pattern!r:.80} stands for too many names")
    expanded = itertools.chain.from_iterable(map(braceexpand, patterns))
    names = dict.fromkeys(itertools.islice(expanded, MOST_SHARDS))
    if next(expanded, None):
        raise ValueError(f"it has more than {MOST_SHARDS} names")
    return names


# ---- reading -------------------------------------------------------------------------------------


@dataclass(unsafe_hash=True)
class SampleEntry:
    """Position of a sample in a tar: the bytes [offset, offset + size) hold its members' headers and content.

    `extensions` and `meta`, its .json parsed, are known when the tar was walked; an index has neither. Entries of the
    same position are equal.
    """

    key: str
    shard: Path
    offset: int
    size: int
    extensions: tuple[str, ...] = field(default=(), compare=False)
    meta: dict = field(default_factory=dict, compare=False)

    def parts(self, only: str | None = None) -> dict[str, bytes]:
        """The bytes of its parts, by extension; SampleError if the sample is not at this position.

        only : this part alone; others, which may have megabytes, are not read.
        """
        found = {}
        try:
            with self.shard.open("rb") as shard:
                shard.seek(self.offset)
                file = shard if only else io.BytesIO(shard.read(self.size))
                for key, extension, member in _members(file):
                    if only and member.offset >= self.offset + self.size:
                        break
                    if key != self.key:
                        raise tarfile.TarError(f"{key} is there")
                    if only in (None, extension):
                        file.seek(member.offset_data)
                        found[extension] = file.read(member.size)
                    if only in found:
                        break
        except Exception as error:  # what tarfile makes of damage
            why = " ".join(str(error).split())[:200]
            raise SampleError("damaged_tar", f"sample {self.key} is not at its place in {self.shard}: {why}") from None
        return found

    def read_meta(self) -> dict:
        """Its .json alone; SampleError if it cannot be used."""
        return decode_meta(self.parts("json").get("json"), self.key)

    def read(self, fits: Fits | None = None) -> EncodedClip:
        """Decode the sample; SampleError if it cannot be used."""
        return decode_sample(self.parts(), self.key, fits)


def samples_of(tar: Path) -> list[SampleEntry]:
    """The samples of a tar, in order; reads headers and .json parts only. ValueError if it is damaged or not a tar.

    Adjacent members with one key are a sample, as in WebDataset:

        a.pth a.json | b.pth b.pickle | a.json | a.json     four samples
    """
    found = list[SampleEntry]()
    try:
        with tar.open("rb") as file:
            for key, extension, member in _members(file, whole=True):
                if not found or found[-1].key != key or extension in found[-1].extensions:
                    found.append(SampleEntry(key, tar, member.offset, 0))
                entry = found[-1]
                entry.extensions += (extension,)
                entry.size = _end(member) - entry.offset
                if extension == "json":
                    file.seek(member.offset_data)
                    with contextlib.suppress(SampleError):  # reading the sample reports it
                        entry.meta = decode_meta(file.read(min(member.size, MOST_TEXT + 1)), key)
                        entry.meta.pop(CHECKSUM, None)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError) as error:  # of odd headers
        after = f"after sample {found[-1].key}" if found else "before its first sample"
        raise ValueError(f"{tar} is not a readable, uncompressed tar {after}: {error}; write it again") from None
    return found


def _end(member: tarfile.TarInfo) -> int:
    """Where the next member begins: content is padded to whole blocks."""
    end = member.offset_data + member.size
    return end + -end % tarfile.BLOCKSIZE


def _members(file: BinaryIO, whole: bool = False) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Key, extension and header of each part of a sample in a whole tar, or in the piece of one that holds a sample."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            # as WebDataset splits a name: at the first dot after the last slash; a name that is
            # not UTF-8 is decoded with surrogates, and escaped, so that every key can be printed
            name = member.name.encode(errors="backslashreplace").decode()
            folder, slash, leaf = name.rpartition("/")
            stem, _, extension = leaf.partition(".")
            if member.isfile() and stem and extension:
                yield folder + slash + stem, extension, member
        # tarfile treats a damaged header as the end, but after a real end there are only zeros
        file.seek(tar.offset)
        # a tail may be long
        if any(block.strip(b"\0") for block in iter(lambda: file.read(1 << 20), b"")):
            raise tarfile.TarError(f"it is damaged at byte {tar.offset}")
        if whole and file.tell() == tar.offset:
            raise tarfile.TarError("the zeros that end a tar are missing, so it was cut")


def find_shards(place: Path, allow_outside: bool = False) -> list[Path]:
    """The tars of a folder and its subfolders, or the given one; `allow_outside`: also where links lead out."""
    if place.is_file():
        return [place]
    inside = ANYWHERE if allow_outside else place
    tars = sorted(p for p in place.rglob("*.tar") if is_plain(p, inside, UNLIMITED))
    if not tars:
        fix = "pass a folder from dfm prepare or another writer (if they are links out: dfm adopt --allow-outside)"
        raise FileNotFoundError(f"{place} has no .tar shards; {fix}")
    return tars


# ---- records -------------------------------------------------------------------------------------


class ShardRecord(Form, strict=False):
    """`.dfm/<shard>.json`, which is written when the tar has got its name.

    latent_sums : see `encoding.latent_sums`. texts : see `shard_plan.ShardPlan`. contents : of its items, by key.
    """

    name: str
    split: str
    samples: int = 0
    bytes: int = 0
    sha256: str | None = None
    drops: list[dict[str, str]] = []
    lost: list[dict[str, str]] = []
    latent_sums: Any = 0
    text_tokens: int = 0
    texts: int = 0
    contents: dict[str, Content | None] = {}


def record_path(folder: Path, name: str) -> Path:
    return folder / RECORDS / f"{name}.json"


def read_record(folder: Path, name: str, whole: bool = True) -> ShardRecord | None:
    """The record of a shard; None if it is unfinished. whole : the tar must be the one that it is of."""
    stored = read_json(record_path(folder, name))
    if ShardRecord.fault(stored):
        return None
    record = ShardRecord(**stored)
    tar = folder / name
    fits = not record.samples or (tar.is_file() and tar.stat().st_size == record.bytes)
    return record if fits or not whole else None
