"""Parts with any bytes changed: a tensor that training can use, or a SampleError; nothing runs.

`DFM_FUZZ=10000` sets the number of cases (`make chaos`).
"""

import os
import pickle
import pickletools
import sys
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfm_nb.base.records import EncodedClip, SampleError
from dfm_nb.data import shards
from tests.attacks.sample_files import saved

CASES = int(os.environ.get("DFM_FUZZ", "300"))
GENERATOR = torch.Generator().manual_seed(0)
LATENT, TEXT = (torch.randn(1, *shape, generator=GENERATOR).bfloat16() for shape in ((16, 1, 4, 4), (3, 8)))
META = {"fps": 24, "latent_shape": [16, 1, 4, 4], "text_tokens": 3, "caption": "a", "more_text_tokens": [1, 2]}
CLIP = EncodedClip("k7", LATENT, TEXT, META, [TEXT[:, :1], TEXT[:, 1:]])
GOOD = shards.encode_parts(CLIP)
FORMS = {
    "pth": [GOOD["pth"], saved(CLIP.latent, _use_new_zipfile_serialization=False), saved(CLIP.latent.float())],
    "pickle": [GOOD["pickle"], pickle.dumps(CLIP.text_emb), pickle.dumps(CLIP.text_emb, protocol=5)],
    "json": [GOOD["json"]],
    shards.MORE: [GOOD[shards.MORE]],
}
WORDS = [op.code.encode("latin-1") for op in pickletools.opcodes]
WORDS += [b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"\x8c\x06whoami\x85R", b"cbuiltins\neval\n"]
WORDS += [b"\xff" * 4, b"PK\x01\x02"]
WATCHED = tuple("os. subprocess. exec compile import open socket. ctypes. shutil. pickle.find_class".split())
ran: list[str] | None = None


def watch(event: str, _arguments: tuple) -> None:
    ours = threading.current_thread() is threading.main_thread()  # not a run's heartbeat of another test
    if ran is not None and ours and event.startswith(WATCHED):
        ran.append(event)


@pytest.fixture(scope="module", autouse=True)
def watched():
    sys.addaudithook(watch)  # hooks stay: this one is silent outside a case
    for codec in "cp437 raw-unicode-escape utf-16 utf-16-be utf-16-le utf-32 utf-32-be utf-32-le utf-8-sig".split():
        "a".encode(codec)  # names in a zip, texts in a pickle and JSON may be in these; a first use imports them


@st.composite
def changed(draw) -> tuple[str, bytes]:
    part = draw(st.sampled_from(sorted(FORMS)))
    data = bytearray(draw(st.sampled_from(FORMS[part])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["bit", "cut", "insert", "replace", "remove"])):
            case "bit" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.sampled_from(WORDS))
            case "replace":
                word = draw(st.sampled_from(WORDS))
                data[at : at + len(word)] = word
            case "remove":
                del data[at : at + draw(st.integers(1, 64))]
    return part, bytes(data)


@settings(max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(changed())
def test_changed_part_is_usable_or_refused(case):
    global ran
    part, data = case
    ran, clip = [], None
    try:
        clip = shards.decode_sample({**GOOD, part: data}, "k7", shards.Fits(16, 8, (1, 4, 4)))
    except SampleError as error:
        assert "k7" in error.detail and "\n" not in error.detail
    finally:
        events, ran = ran, None
    assert not events
    if clip is not None:
        assert clip.latent.shape == (1, 16, 1, 4, 4) and clip.text_emb.shape[::2] == (1, 8)
        assert clip.latent.is_floating_point() and clip.text_emb.dtype == torch.bfloat16
        assert clip.latent.isfinite().all() and clip.text_emb.isfinite().all() and clip.text_emb.shape[1] >= 1
