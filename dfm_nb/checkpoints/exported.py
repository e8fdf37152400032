"""The file of `dfm export`: weights by name and what else generation needs, in one `.safetensors` or `.pth`.

It holds tensors and one text, `dfm_nb` (in a `.safetensors`, of its metadata): JSON of

    format   "dfm_nb.weights.1"
    files    the text files that lie in a checkpoint folder: config.yaml, manifest.json
    sha256   of all the rest: that JSON, and each tensor's name, dtype, shape and bytes

A small file that is no text (the tokenizer's, the empty caption's) is a tensor of bytes, `file.NAME`. Reading runs no
code.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import mmap
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, StringConstraints, ValidationError
from torch import Tensor

from dfm_nb.base.files import older, replacing
from dfm_nb.checkpoints.torch_dist import CheckpointError, reason

SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
"""What that format calls the types that weights have."""
Kind = tuple[torch.dtype, list[int]]

MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Of mmap(2); Python names it from 3.13 on."""

KEY, BYTES = "dfm_nb", "file."
TEXT, BINARY = r"^\w+\.(json|yaml)$", r"^\w+\.safetensors$"
"""Names of the small files: plain, so that none leaves the folder that it is unpacked to."""


class About(BaseModel, strict=True, extra="forbid"):
    """The text `dfm_nb`."""

    format: Literal["dfm_nb.weights.1"] = "dfm_nb.weights.1"
    files: dict[Annotated[str, StringConstraints(pattern=TEXT)], str]
    sha256: str = ""

    def json_text(self) -> str:
        """One way to write it, as a checksum covers it."""
        return json.dumps(dict(self), sort_keys=True)


class Lazy(Mapping[str, Tensor]):
    """Tensors by name, each made when it is asked for: weights that are larger than memory."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Tensor]):
        self._names, self._make = {name: name for name in names}, make

    def __getitem__(self, name: str) -> Tensor:
        return self._make(self._names[name])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def as_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Mapping[str, Tensor]:
    """Rounded to `dtype`, one at a time; None leaves each as it is."""
    return Lazy(tensors, lambda name: tensors[name].to(dtype or tensors[name].dtype))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _checksum(files: dict[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(About(files=files).json_text().encode())
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(json.dumps([name, str(t.dtype), list(t.shape)]).encode())
        digest.update(_bytes(t))
    return digest.hexdigest()


def write(output: Path, weights: Mapping[str, Tensor], files: Mapping[str, bytes]) -> None:
    """Write weights [on the CPU] and the small files (name -> content) as one file, whole or absent.

    A `.safetensors` is written one tensor at a time, each of which is asked for three times.
    """
    texts = {name: content.decode() for name, content in files.items() if re.fullmatch(TEXT, name)}
    packed = {BYTES + name: content for name, content in files.items() if name not in texts}
    small = {k: torch.frombuffer(bytearray(v), dtype=torch.uint8) for k, v in packed.items()}
    tensors = Lazy([*weights, *small], lambda name: small[name] if name in small else weights[name])
    kinds = kinds_of(tensors)
    about = {KEY: About(files=texts, sha256=_checksum(texts, tensors)).json_text()}
    with replacing(output) as temporary:
        if output.suffix == ".safetensors":
            save(temporary, tensors, about, kinds)
        else:
            torch.save(dict(tensors) | about, temporary)
    count = sum(math.prod(kinds[name][1]) for name in weights)
    print(f"[INFO] wrote {output}: {len(weights)} tensors, {count / 1e6:.2f} M parameters")


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Type and shape of each, which is asked for once."""
    return {name: (t.dtype, list(t.shape)) for name, t in tensors.items()}


def save(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], kinds: Mapping[str, Kind] | None = None
) -> None:
    """As safetensors' `save_file`, which must have all tensors in memory. kinds : of the tensors, where known."""
    kinds = kinds or kinds_of(tensors)
    header: dict[str, Any] = {"__metadata__": metadata}
    place = 0
    # the widest first, so that each begins at a multiple of its own width
    for name in sorted(tensors, key=lambda name: -kinds[name][0].itemsize):
        dtype, shape = kinds[name]
        if dtype not in SAFETENSORS:
            raise CheckpointError(f"the weight {name} must be float32, bfloat16 or float16; it is {dtype}")
        end = place + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS[dtype], "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8, as in all such files
    with file.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name in list(header)[1:]:
            f.write(_bytes(tensors[name]))


def check_shapes(source: Path, found: Mapping[str, list], wanted: Mapping[str, list], note: str = "") -> None:
    """ValueError with the name of a weight that `source` lacks, or that is unknown or of another shape."""
    for name in sorted(found.keys() ^ wanted.keys()):
        fault = "lacks the weight" if name in wanted else "holds the unknown weight"
        raise ValueError(f"{source} {fault} {name}{note}: it is not of the published network")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{source}: the weight {name}{note} must have shape {shape}; it has {found[name]}")


def read(file: Path) -> tuple[dict[str, Tensor], dict[str, bytes]]:
    """Weights by name, and the small files.

    Raises
    ------
    CheckpointError : the file is damaged, was changed, holds more than tensors, or is no export of dfm_nb.
    """
    try:
        content, text = _open(file)
    except Exception as error:  # a damaged file can raise anything
        raise CheckpointError(
            f"{file} is damaged or holds more than tensors: {reason(error)}; export it again"
        ) from None
    if not isinstance(content, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items()
    ):
        raise CheckpointError(f"{file} must hold tensors by name and nothing else; export it again")
    if text is None:
        what = f"{file} holds weights without settings: unless they are another program's (dfm import), it"
        raise CheckpointError(older(what, "export it again"))
    try:
        about = About.model_validate_json(text)
    except ValidationError:
        raise CheckpointError(
            f"{file} has no text {KEY!r} of a format that is known; it is damaged, or newer"
        ) from None
    if _checksum(about.files, content) != about.sha256:
        raise CheckpointError(f"{file} is damaged: its content does not match its checksum; copy it again")
    packed = [name for name in content if name.startswith(BYTES)]
    files = {name.removeprefix(BYTES): content.pop(name).numpy().tobytes() for name in packed}
    if odd := [name for name in files if not re.fullmatch(BINARY, name)]:
        raise CheckpointError(f"{file} must hold files of plain names only; it holds {odd[0]!r:.80}")
    return content, files | {name: value.encode() for name, value in about.files.items()}


def _open(file: Path) -> tuple[Any, str | None]:
    """What the file holds, and its text apart. Tensors stay on disk until they are used."""
    if file.suffix == ".safetensors":
        tensors, about = open_safetensors(file)
        return tensors, about.get(KEY)
    content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return content, content.pop(KEY, None) if isinstance(content, dict) else None


def open_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata; CheckpointError for a damaged file, or another type of number.

    Tensors stay on disk until they are used; what is written to them stays in memory. Linux refuses safetensors' own
    map when the file is larger than memory, for it reserves all of it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if file.exists() and not file.is_file():
            raise OSError("it is no regular file")
        with safe_open(file, "np"), file.open("rb") as f:  # checks the header
            # private: a tensor can be written to. Without NORESERVE, Linux promises memory for each such page.
            whole = memoryview(mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE | MAP_NORESERVE))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is missing or damaged ({error}); fetch or export it again") from None
    start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(bytes(whole[8:start]))
    about, kinds = header.pop("__metadata__", {}), {name: kind for kind, name in SAFETENSORS.items()}
    if odd := [name for name, entry in header.items() if entry["dtype"] not in kinds]:
        kind = header[odd[0]]["dtype"]
        raise CheckpointError(f"{file}: {odd[0]!r:.120} must be float32, bfloat16 or float16; it is {kind}")

    def part(dtype: str, shape: list[int], data_offsets: list[int], **_: Any) -> Tensor:
        begin, end = (start + place for place in data_offsets)
        if begin == end:
            return torch.empty(shape, dtype=kinds[dtype])
        return torch.frombuffer(whole[begin:end], dtype=kinds[dtype]).view(shape)

    return {name: part(**entry) for name, entry in header.items()}, about


def unpacked(files: Mapping[str, bytes]) -> Path:
    """A folder with these files; it is removed when the process ends."""
    return Path(_folder(tuple(sorted(files.items()))).name)


@functools.cache
def _folder(files: tuple[tuple[str, bytes], ...]) -> tempfile.TemporaryDirectory:
    folder = tempfile.TemporaryDirectory(prefix="dfm_nb-")
    for name, content in files:
        Path(folder.name, name).write_bytes(content)
    return folder
