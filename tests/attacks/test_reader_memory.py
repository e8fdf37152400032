"""Reading a part takes at most four times its bytes and 64 MiB, whatever it says of itself."""

import io
import json
import struct
import subprocess
import sys
import zipfile

import pytest
import torch

from tests.attacks.sample_files import good_parts, saved, zip_bomb

MIB = 1 << 20


def many_records() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for i in range(40_000):
            archive.writestr(f"a/data/{i}", b"")
        archive.writestr("a/data.pkl", b"N.")
    return buffer.getvalue()


def bombs() -> dict[str, bytes]:
    latent = torch.zeros(1, 16, 64, 128, 128)  # 64 MiB
    wide = "a" * (16 * MIB) + "\U0001f98b"
    return {
        "honest-zip.pth": saved(latent),
        "honest-old.pth": saved(latent, _use_new_zipfile_serialization=False),
        "stride-0.pth": saved(torch.zeros(1, 1, 1, 1, 1).expand(1, 16, 1000, 1000, 1000)),
        "zip-bomb.pth": zip_bomb(512),
        "zip-records.pth": many_records(),
        "memo-1.pickle": b"\x80\x04N" + b"r\x00\x00\x00\x7f" * 1000 + b".",
        "lists-0.pickle": b"\x80\x04" + b"]" * (16 * MIB) + b".",
        "text-0.pickle": b"\x80\x04X" + struct.pack("<I", len(wide.encode())) + wide.encode() + b".",
        "bytes-0.pickle": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 34) + b".",
        "lists-0.json": b'{"a":[' + b"[]," * (4 * MIB) + b"1]}",
    }


@pytest.mark.slow
def test_reader_takes_no_more_than_four_times_the_part(tmp_path):
    for part, data in good_parts().items():
        (tmp_path / f"good.{part}").write_bytes(data)
    attacks = bombs()
    for name, data in attacks.items():
        (tmp_path / name).write_bytes(data)
    argv = [sys.executable, "-m", "tests.attacks.reader_memory", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.keys() == attacks.keys()
    over = {name: (size, took) for name, (size, took) in found.items() if took > 4 * size + 64 * MIB}
    assert not over
