"""Samples that cannot be used: each kind changes the parts of a good one. Nothing of it is stored."""

import io
import json
import pickle
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from dfm_nb.base.files import listed_as
from dfm_nb.data import shards
from dfm_nb.data.adoption import index_dataset
from dfm_nb.data.prepared_folder import seal_folder
from tests.attacks.checkpoint_files import Evil
from tests.conftest import STORED

MARK = "DFM_ATTACK_MARK"
"""Environment variable with the file that code of a sample would make."""

EVIL = Evil(f"${MARK}")

Parts = dict[str, bytes]
Change = Callable[[Parts], object]


class EvilInside:
    """The same in the bytes that a storage is loaded from."""

    def __reduce__(self):
        return torch.storage._load_from_bytes, (pickle.dumps(EVIL),)


class Rebuilt:
    """A tensor by torch's own function, with these arguments."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.arguments


def saved(value: object, **how) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


def rebuilt(size: tuple, stride: tuple, offset: int = 0) -> bytes:
    return pickle.dumps(Rebuilt(torch.zeros(16).storage(), offset, size, stride, False, {}))


def poisoned() -> bytes:
    """A good tensor behind a function of torch on which BUILD sets an attribute."""
    poison = b"ctorch._utils\n_rebuild_tensor_v2\n}\x8c\x06poison\x8c\x02ossb0"
    return b"\x80\x04" + poison + pickle.dumps(torch.zeros(1, 4, 384))[2:]


def zip_bomb(mebibytes: int) -> bytes:
    """A `.pth` whose numbers are compressed a thousandfold."""
    tensor, buffer = saved(torch.zeros(1, 16, 1, 4, 4)), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(tensor)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, bytes(mebibytes << 20) if "/data/" in name else old.read(name))
    return buffer.getvalue()


def big_numel(data: bytes) -> bytes:
    """The count of numbers (a BININT2 in torch's pickle) made 65,535."""
    at = data.index(pickle.BININT2)
    return data[:at] + pickle.BININT2 + struct.pack("<H", 65_535) + data[at + 3 :]


def latent(change: Callable[[torch.Tensor], object], **how) -> Change:
    return lambda p: p.update(pth=saved(change(shards.decode_tensor("pth", p["pth"])), **how))


def text(change: Callable[[torch.Tensor], object]) -> Change:
    return lambda p: p.update(pickle=pickle.dumps(change(shards.decode_tensor("pickle", p["pickle"]))))


def meta(**values) -> Change:
    return lambda p: p.update(json=json.dumps(json.loads(p["json"]) | values).encode())


def raw(part: str, data: bytes) -> Change:
    return lambda p: p.update({part: data})


def at(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[7] = value
        return tensor

    return change


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor], -1)


UNUSABLE: dict[str, Change] = {
    "no pth": lambda p: p.pop("pth"),
    "cut pth": lambda p: p.update(pth=p["pth"][:-40]),
    "code pth": raw("pth", pickle.dumps(EVIL)),
    "code in pth": raw("pth", saved([EVIL])),
    "code in old pth": raw("pth", saved([EVIL], _use_new_zipfile_serialization=False)),
    "list pth": latent(lambda t: [t]),
    "NaN latent": latent(at(float("nan"))),
    "huge latent": latent(at(1e30)),
    "3 dims": latent(lambda t: t[0, 0]),
    "no frames": latent(lambda t: t[:, :, :0].clone()),
    "stride 0": latent(lambda t: torch.zeros(1, 1, 1, 1, 1).expand(1, 16, 100, 1000, 1000)),
    "too many numbers": lambda p: p.update(pth=big_numel(p["pth"])),
    "zip bomb": raw("pth", zip_bomb(64)),
    "no pickle": lambda p: p.pop("pickle"),
    "cut pickle": lambda p: p.update(pickle=p["pickle"][:-9]),
    "code pickle": raw("pickle", pickle.dumps(EVIL)),
    "code inside": raw("pickle", pickle.dumps(EvilInside())),
    "persistent id": raw("pickle", b"\x80\x04\x8c\x01aQ."),
    "attribute of a function": raw("pickle", poisoned()),
    "stride 0 text": raw("pickle", rebuilt((1, 100_000, 100_000), (0, 0, 0))),
    "offset beyond": raw("pickle", rebuilt((1, 2, 4), (8, 4, 1), offset=12)),
    "NaN text": text(at(float("nan"))),
    "no tokens": text(lambda t: t[:, :0].clone()),
    "wide text": text(wide),
    "null json": raw("json", b"null"),
    "binary json": raw("json", b"\xff\xfe\x00"),
    "large json": raw("json", b'{"a":[' + b"[]," * (1 << 20) + b"1]}"),
    "long number": raw("json", b'{"fps":' + b"9" * 5000 + b"}"),
    "other shape": meta(latent_shape=[16, 1, 2, 4]),
    "fps NaN": meta(fps=float("nan")),
    "caption as list": meta(caption=["a"]),
    "lone surrogate": meta(caption="\ud83d x"),
    "tokens beyond": meta(text_tokens=10**6),
}

CONTROLS: dict[str, Change] = {
    "as it was": lambda p: None,
    "float32": latent(lambda t: t.float()),
    "float64 text": text(lambda t: t.double()),
    "old form": latent(lambda t: t, _use_new_zipfile_serialization=False),
    "of a batch": latent(lambda t: torch.cat([t, t])[1:]),
    "with gradient": latent(lambda t: t.float().requires_grad_()),
    "protocol 5": lambda p: p.update(pickle=pickle.dumps(shards.decode_tensor("pickle", p["pickle"]), protocol=5)),
    "no caption": meta(caption=None),
    "no json": lambda p: p.pop("json"),
    "other keys": meta(anything={"a": [1, None]}),
    "json with a byte order mark": lambda p: p.update(json=b"\xef\xbb\xbf" + p["json"]),
}
"""What other writers make of a good sample."""


def good_parts() -> Parts:
    return shards.samples_of(STORED / "data" / "rank0-000000.tar")[0].parts()


def add_sample(tar: Path, key: str, **parts: bytes) -> None:
    with tarfile.open(tar, "a", format=tarfile.USTAR_FORMAT) as file:
        for part, data in parts.items():
            member = tarfile.TarInfo(f"{key}.{part}")
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))


def spoil(folder: Path, position: int, *changes: Change, split: str = "train") -> list[str]:
    """A copy of the stored data in `folder` whose samples from `position` on are changed; returns their keys."""
    shutil.copytree(STORED / "data", folder)
    tar = folder / {"train": "rank0-000000.tar", "val": "rank0-000001.tar"}[split]
    found = [(entry.key, entry.parts()) for entry in shards.samples_of(tar)]
    for (_, parts), change in zip(found[position:], changes):
        change(parts)
    tar.unlink()
    for key, parts in found:
        add_sample(tar, key, **parts)
    reseal(folder)
    return [key for key, _ in found[position : position + len(changes)]]


def seal_as_it_is(folder: Path) -> None:
    """Checksums that fit the files."""
    seal_folder(folder, {tar.name: listed_as(tar) for tar in folder.glob("*.tar")})


def reseal(folder: Path) -> None:
    """Metadata, index and checksums that fit the tars."""
    tars = sorted(p.name for p in folder.glob("*.tar"))
    shards.write_energon_metadata(folder, {"train": tars[:1], "val": tars[1:], "test": []})
    index_dataset(folder)
