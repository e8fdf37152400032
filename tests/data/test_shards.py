import io
import json
import pickle
import shutil
import sqlite3
import sys
import types
import uuid

import pytest
import torch
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory

from dfm_nb.base import files
from dfm_nb.base.records import EncodedClip, SampleError
from dfm_nb.data import shards
from tests.data.shard_files import write_shard
from tests.refusals import refused


def clip(key="a-1", seed=0):
    g = torch.Generator().manual_seed(seed)
    latent = torch.randn(1, 16, 2, 4, 4, generator=g).bfloat16()
    text = torch.randn(1, 5, 8, generator=g).bfloat16()
    return EncodedClip(key, latent, text, {"caption": "grün", "fps": 12, "key": key})


def test_shard_gives_back_what_was_written(tmp_path):
    clips = [clip("a-1", 1), clip("b_2", 2)]
    digest, size = write_shard(tmp_path / "rank0-000000.tar", clips)
    entries = shards.samples_of(tmp_path / "rank0-000000.tar")
    assert [e.key for e in entries] == ["a-1", "b_2"] and entries[0].meta["caption"] == "grün"
    for want, entry in zip(clips, entries):
        got = entry.read()
        assert torch.equal(got.latent, want.latent) and torch.equal(got.text_emb, want.text_emb)
        assert got.latent.dtype == torch.bfloat16 and got.meta == want.meta
    tar = tmp_path / "rank0-000000.tar"
    assert files.sha256(tar) == digest and tar.stat().st_size == size


def test_energons_metadata_is_what_energon_writes(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    names = ["rank0-000000.tar", "rank1-000000.tar"]
    write_shard(ours / names[0], [clip("a-1", 1), several("b_2")])
    write_shard(ours / names[1], [clip("c", 2)])
    shutil.copytree(ours, theirs)
    shards.write_energon_metadata(ours, {"train": names[:1], "val": names[1:]})
    ratio = [("train", 1.0), ("val", 1.0)]
    BaseWebdatasetFactory.prepare_dataset(EPath(str(theirs)), names, split_parts_ratio=ratio, workers=1)
    for file in (".nv-meta/.info.json", *(f"{name}.idx" for name in names)):
        read = json.loads if file.endswith("json") else bytes
        assert read((ours / file).read_bytes()) == read((theirs / file).read_bytes())
    one, other = (list(sqlite3.connect(f / ".nv-meta" / "index.sqlite").iterdump()) for f in (ours, theirs))
    assert one == other and len([line for line in one if "INTO" in line]) == 3 + 10
    uuid.UUID((ours / ".nv-meta" / "index.uuid").read_text())

    write_shard(ours / names[1], [clip("a-1", 2)])
    refused("a-1", shards.write_energon_metadata, ours, {"train": names})


def several(key="a-1"):
    """Of three captions."""
    one, g = clip(key), torch.Generator().manual_seed(7)
    lengths = [2, 6]
    meta = one.meta | {"more_captions": ["blau", "rot"], "more_text_tokens": lengths}
    more = [torch.randn(1, length, 8, generator=g).bfloat16() for length in lengths]
    return EncodedClip(key, one.latent, one.text_emb, meta, more)


def test_further_captions_are_one_more_part_and_the_others_stay_as_they_are(tmp_path):
    one, three = shards.encode_parts(clip()), shards.encode_parts(several())
    assert [*one] == [*shards.PARTS] and [*three] == [*shards.PARTS, shards.MORE]
    assert all(one[part] == three[part] for part in ("pth", "pickle"))
    write_shard(tmp_path / "a.tar", [several("a-1"), clip("b-1"), several("c-1")])
    entries = shards.samples_of(tmp_path / "a.tar")
    read = [entry.read() for entry in entries]
    assert [entry.key for entry in entries] == ["a-1", "b-1", "c-1"] and [len(c.more_text) for c in read] == [2, 0, 2]
    assert all(torch.equal(a, b) for a, b in zip(read[0].more_text, several().more_text, strict=True))
    assert torch.equal(read[0].text_emb, clip().text_emb) and read[0].meta == several().meta


@pytest.mark.parametrize(
    "meta", [{"more_text_tokens": [2, 5]}, {"more_text_tokens": None}, {"more_text_tokens": [8, 0]}, {"part": b""}]
)
def test_further_captions_that_do_not_fit_are_refused(meta):
    parts = shards.encode_parts(several())
    parts[shards.MORE] = meta.pop("part", parts[shards.MORE])
    parts["json"] = json.dumps(several().meta | meta).encode()
    refused("sample k", shards.decode_sample, parts, "k", error=SampleError)
    infinite = several()
    infinite.more_text[1][0, 3, 2] = float("inf")
    refused("NaN", shards.decode_sample, shards.encode_parts(infinite), "k", error=SampleError)


def test_sample_without_batch_dims_is_the_same_sample():
    """As `prepare_dataset_wan.py` of Megatron-Bridge writes it."""
    want, buffer = clip(), io.BytesIO()
    torch.save(want.latent[0].clone(), buffer)
    got = shards.decode_sample({"pth": buffer.getvalue(), "pickle": pickle.dumps(want.text_emb[0].clone())}, "a-1")
    assert torch.equal(got.latent, want.latent) and torch.equal(got.text_emb, want.text_emb)
    torch.save(want.latent[0, 0].clone(), buffer := io.BytesIO())
    refused(
        "a-1",
        shards.decode_sample,
        {"pth": buffer.getvalue(), "pickle": pickle.dumps(want.text_emb)},
        "a-1",
        error=SampleError,
    )


def test_text_part_is_the_same_where_megatron_core_has_replaced_torchs_function(monkeypatch):
    """megatron-core 0.19 does so on import; a pickle would name its function instead, and has in other writers."""
    tensor = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    plain = shards._pickled(tensor)

    def safe_load_from_bytes(data):
        return torch.load(io.BytesIO(data), weights_only=True)

    name = "megatron.core.safe_globals"
    safe_load_from_bytes.__module__, safe_load_from_bytes.__qualname__ = name, "safe_load_from_bytes"
    module = types.ModuleType(name)
    module.safe_load_from_bytes = safe_load_from_bytes
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", safe_load_from_bytes)
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol=4).dump(tensor)
    assert b"megatron.core.safe_globals" in buffer.getvalue()
    assert torch.equal(shards.decode_tensor("pickle", buffer.getvalue()), tensor)
    assert shards._pickled(tensor) == plain


@pytest.mark.parametrize("part, at", [("pth", -500), ("pickle", -200), ("json", 12), (shards.MORE, -200)])
def test_a_number_that_changed_is_found(part, at):
    """Finite still, of the same shape, and inside what no other check covers."""
    parts = shards.encode_parts(several())
    good = shards.decode_sample(parts, "k")
    assert shards.CHECKSUM not in good.meta
    data = bytearray(parts[part])
    data[at] ^= 1
    refused("sample k", shards.decode_sample, parts | {part: bytes(data)}, "k", error=SampleError)
    unsealed = json.dumps(good.meta | {"caption": "another"}).encode()  # of another writer: none to compare
    assert shards.decode_sample(parts | {"json": unsealed}, "k").meta["caption"] == "another"


def paired(key="a-1"):
    g = torch.Generator().manual_seed(9)
    given = [torch.randn(1, 16, *shape, generator=g).bfloat16() for shape in ([1, 2, 6], [2, 4, 4])]
    one = clip(key)
    meta = one.meta | {"given_shapes": [[1, 2, 6], [2, 4, 4]]}
    return EncodedClip(key, one.latent, one.text_emb, meta, given=given)


def test_given_pictures_are_one_more_part_and_the_others_stay_as_they_are(tmp_path):
    one, pair = shards.encode_parts(clip()), shards.encode_parts(paired())
    assert [*pair] == [*shards.PARTS, shards.GIVEN] and all(one[part] == pair[part] for part in ("pth", "pickle"))
    write_shard(tmp_path / "a.tar", [paired("a-1"), clip("b-1")])
    first, second = (
        entry.read(shards.Fits(given=n)) for entry, n in zip(shards.samples_of(tmp_path / "a.tar"), (44, 0))
    )
    assert not second.given and all(torch.equal(a, b) for a, b in zip(first.given, paired().given, strict=True))


def test_given_pictures_that_do_not_fit_or_changed_are_refused():
    parts = shards.encode_parts(paired())
    missing = {part: data for part, data in parts.items() if part != shards.GIVEN}
    other = parts | {"json": parts["json"].replace(b"[1, 2, 6]", b"[1, 2, 5]")}
    changed = parts | {
        shards.GIVEN: parts[shards.GIVEN].replace(
            paired().given[0][0, 0, 0].view(torch.uint8).numpy().tobytes()[:8], b"0" * 8
        )
    }
    refused("", shards.decode_sample, missing, "a-1", error=SampleError)
    for damaged, reason in ((other, "wrong_shape"), (changed, "damaged")):
        assert refused("", shards.decode_sample, damaged, "a-1", error=SampleError).reason == reason
    refused("given", shards.decode_sample, parts, "a-1", shards.Fits(given=43), error=SampleError)
