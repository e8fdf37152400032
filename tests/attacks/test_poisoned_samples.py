"""A sample whose pickle sets attributes of what it names is refused, and changes nothing in the process."""

import io
import pickle

import pytest
import torch

from dfm_nb.base.records import EncodedClip, SampleError
from dfm_nb.data import shards

NAMES = {
    "rebuild": b"torch._utils\n_rebuild_tensor_v2\n",
    "storage": b"torch.storage\n_load_from_bytes\n",
    "megatron": b"megatron.core.safe_globals\nsafe_load_from_bytes\n",
    "ordered dict": b"collections\nOrderedDict\n",
}
ATTRIBUTES = (
    "__module__",
    "__qualname__",
    "__name__",
    "__defaults__",
    "__code__",
    "__kwdefaults__",
    "__call__",
    "poison",
)


def build(name: bytes, attribute: str, slots: bool, nested: bool) -> bytes:
    """`name` with `attribute` set by BUILD, from a state dict or from slots; alone, or before a good tensor."""
    text = b"\x8c" + bytes([len(attribute)]) + attribute.encode()
    state = b"}" + text + b"\x8c\x02oss"
    poison = b"c" + name + (b"N" + state + b"\x86" if slots else state) + b"b"
    tail = b"0" + pickle.dumps(torch.zeros(1, 4, 8))[2:] if nested else b"."
    return b"\x80\x04" + poison + tail


def good() -> EncodedClip:
    return EncodedClip("a", torch.ones(1, 16, 1, 4, 4), torch.ones(1, 3, 8), {"caption": "a"})


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "before a tensor"])
@pytest.mark.parametrize("slots", [False, True], ids=["dict", "slots"])
@pytest.mark.parametrize("attribute", ATTRIBUTES)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_poisoned_sample_is_refused_and_good_ones_still_work(name, attribute, slots, nested):
    parts = shards.encode_parts(good())
    functions = (torch._utils._rebuild_tensor_v2, torch.storage._load_from_bytes)
    before = [(f.__module__, f.__qualname__, dict(vars(f)), f.__code__, f.__defaults__) for f in functions]
    with pytest.raises(SampleError, match="was refused"):
        shards.decode_sample(parts | {"pickle": build(name, attribute, slots, nested)}, "bad")
    assert [(f.__module__, f.__qualname__, dict(vars(f)), f.__code__, f.__defaults__) for f in functions] == before
    clip = shards.decode_sample(shards.encode_parts(good()), "a")
    assert torch.equal(clip.latent.float(), good().latent) and torch.equal(clip.text_emb.float(), good().text_emb)
    buffer = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, buffer)
    assert torch.equal(torch.load(io.BytesIO(buffer.getvalue()))["weight"], torch.ones(2))
    assert torch.equal(pickle.loads(pickle.dumps(torch.ones(2))), torch.ones(2))
