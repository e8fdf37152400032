"""The pipeline of one rank on a tiny source and encoders whose results are known."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from dfm_nb.base import records
from dfm_nb.base.records import Clip, SampleError
from dfm_nb.data import encoding, shards
from dfm_nb.data.captioning import Edit, tag_captions
from dfm_nb.data.shard_plan import ShardPlan
from tests.frames import black


class Source(records.Source):
    """Item i gives `clips[i]` grey images of 16 x 16 px with the value i; negative: a fault after so many clips."""

    name = "tiny"

    def __init__(self, clips, wide=(), slow_first=False):
        self.clips, self.wide, self.slow_first, self.reading, self.most = clips, set(wide), slow_first, 0, 0
        self.lock = threading.Lock()

    def item_key(self, index):
        return f"item-{index}"

    def read(self, index):
        if self.slow_first and index == 0:
            time.sleep(0.2)
        count = self.clips[index]
        for i in range(abs(count)):
            shape = (1, 16, 32 if index in self.wide else 16, 3)
            yield Clip(f"item-{index}-{i}", np.full(shape, index, np.uint8), f"caption {index % 3}", 1.0, self.name)
        if count < 0:
            raise SampleError("bad_end", f"item-{index} breaks off")


class Mean:
    """Latent = mean of each 8x8 block of red, in all channels; notes the batches."""

    def __init__(self):
        self.batches = []

    def encode(self, video):
        self.batches.append(tuple(video.shape))
        z = torch.nn.functional.avg_pool3d(video[:, :1, ::4], (1, 8, 8))
        return z.repeat(1, 16, 1, 1, 1)


class Length:
    """One token per word; notes what was encoded."""

    def __init__(self):
        self.calls = []

    def encode(self, captions):
        self.calls.append(list(captions))
        return [torch.full((len(c.split()), 4), float(len(c))).bfloat16() for c in captions]


def encoders(tokenizer=None, text=None):
    return encoding.Encoders(encoding.LatentEncoder(tokenizer or Mean()), text or Length())


def encode(folder, source, plans, tokenizer=None, text=None, workers=2, on_item=lambda: None):
    (folder / shards.RECORDS).mkdir(exist_ok=True)
    reading = encoding.Reading(source, workers=workers, on_item=on_item)
    encoding.encode_shards(plans, reading, encoders(tokenizer, text), folder)
    return [shards.read_record(folder, p.name) for p in plans]


def plans_of(count, size):
    groups = [tuple(range(i, min(i + size, count))) for i in range(0, count, size)]
    return [ShardPlan(f"rank0-{n:06d}.tar", "train", items) for n, items in enumerate(groups)]


def test_samples_are_the_items_in_order_with_their_own_latents(tmp_path):
    source, ticks = Source([1] * 20, wide=(3, 4, 11), slow_first=True), []
    records = encode(tmp_path, source, plans_of(20, 7), workers=3, on_item=lambda: ticks.append(1))
    entries = [e for r in records for e in shards.samples_of(tmp_path / r.name)]
    assert [e.key for e in entries] == [f"item-{i}-0" for i in range(20)] and len(ticks) == 20
    for i, e in enumerate(entries):
        clip = e.read()
        assert clip.latent.shape == (1, 16, 1, 2, 4 if i in (3, 4, 11) else 2)
        assert torch.equal(clip.latent.unique(), torch.tensor([i / 127.5 - 1]).bfloat16())
        assert e.meta["latent_shape"] == list(clip.latent.shape[1:]) and e.meta["text_tokens"] == 2


def test_equal_shapes_share_a_batch_and_equal_captions_are_encoded_once(tmp_path):
    tokenizer, text = Mean(), Length()
    encode(tmp_path, Source([1] * 9, wide=(2, 5)), plans_of(9, 9), tokenizer, text)
    assert sorted(b[0] for b in tokenizer.batches) == [2, 7]
    assert text.calls == [["caption 0", "caption 1", "caption 2"]]


class Captioned(Source):
    """Each clip with a further caption and two tags."""

    def read(self, index):
        for clip in super().read(index):
            yield replace(clip, more_captions=["a longer caption", clip.caption], tags=["red", "large"])


def test_all_captions_of_a_sample_are_encoded_and_of_equal_ones_one(tmp_path):
    """The parts of one caption are the same with and without further ones."""
    text, edit = Length(), Edit(key="item-1-0", caption="a longer caption")
    (tmp_path / shards.RECORDS).mkdir()
    reading = encoding.Reading(Captioned([1, 1]), edits={edit.key: edit}, tag_captions=2)
    (plan,) = plans_of(2, 2)
    encoding.encode_shards([plan], reading, encoders(text=text), tmp_path)
    first, second = (entry.read() for entry in shards.samples_of(tmp_path / plan.name))
    of_tags = [caption for caption in first.meta["more_captions"] if caption != "a longer caption"]
    assert of_tags and all({*caption.split(", ")} <= {"red", "large"} for caption in of_tags)
    assert first.meta["caption"] == "caption 0" and first.meta["more_captions"][0] == "a longer caption"
    assert [t.shape[1] for t in first.more_text] == [len(c.split()) for c in first.meta["more_captions"]]
    assert second.meta["caption"] == edit.caption and "caption 1" not in second.meta["more_captions"]
    (tmp_path / "one").mkdir()
    (record,) = encode(tmp_path / "one", Source([1, 1]), [plan])
    alone = shards.samples_of(tmp_path / "one" / plan.name)[0]
    with_more = shards.samples_of(tmp_path / plan.name)[0].parts()
    assert all(with_more[part] == content for part, content in alone.parts().items() if part != "json")
    assert "more_captions" not in alone.meta and record.text_tokens == 4


class Lacking(Source):
    def read(self, index):
        for clip in super().read(index):
            yield replace(clip, lost={"cut_short": "its file is cut"} if index == 1 else {})


class ShortWords(Length):
    def lost(self, caption):
        return {"text_cut": f"{caption} is long"} if caption.endswith("2") else {}


def test_what_a_sample_lacks_is_noted_with_its_key_also_when_captions_change(tmp_path):
    (plan,), source = plans_of(3, 3), Lacking([1, 1, 1])
    (record,) = encode(tmp_path, source, [plan], text=ShortWords())
    assert [(lost["key"], lost["reason"]) for lost in record.lost] == [
        ("item-1-0", "cut_short"),
        ("item-2-0", "text_cut"),
    ]
    edits = {"item-2-0": Edit(key="item-2-0", caption="brief")}
    reading = encoding.Reading(source, edits=edits)
    assert encoding.rewrite_shard(plan._replace(texts=1), reading, encoders(text=ShortWords()), tmp_path)
    assert [lost["reason"] for lost in shards.read_record(tmp_path, plan.name).lost] == ["cut_short"]


class Gradient(Source):
    """Pictures whose left half is dark, of which the second says so in its further caption."""

    def read(self, index):
        for clip in super().read(index):
            video = np.broadcast_to(np.repeat(np.uint8([20, 200]), 8)[:, None], clip.video.shape)
            said = ["dark on the Left"] if index == 1 else ["upright, in bright light"]
            yield replace(clip, video=video, more_captions=said)


def test_mirrored_training_samples_follow_theirs_unless_a_caption_names_a_side(tmp_path):
    edits = {
        "item-2-0": Edit(key="item-2-0", caption="changed"),
        "item-3-0-flip": Edit(key="item-3-0-flip", left_out=True),
        "item-4-0": Edit(key="item-4-0", left_out=True),
    }
    (tmp_path / shards.RECORDS).mkdir()
    reading = encoding.Reading(Gradient([1] * 6), edits=edits, flip=True)
    plans = [ShardPlan("train.tar", "train", range(5)), ShardPlan("val.tar", "val", [5])]
    encoding.encode_shards(plans, reading, encoders(), tmp_path)
    record = shards.read_record(tmp_path, "train.tar")
    dropped = [(drop["key"], drop["reason"]) for drop in record.drops]
    assert dropped == [("item-1-0-flip", "not_mirrored"), ("item-3-0-flip", "left_out"), ("item-4", "left_out")]
    found = {entry.key: entry.read() for plan in plans for entry in shards.samples_of(tmp_path / plan.name)}
    assert [*found] == [f"item-{k}" for k in ("0-0", "0-0-flip", "1-0", "2-0", "2-0-flip", "3-0", "5-0")]
    for key in ("item-0-0", "item-2-0"):
        assert torch.equal(found[f"{key}-flip"].latent, found[key].latent.flip(-1))
        assert found[f"{key}-flip"].meta == found[key].meta | {"key": f"{key}-flip"}
    assert not torch.equal(found["item-0-0"].latent, found["item-0-0"].latent.flip(-1))
    assert found["item-2-0-flip"].meta["caption"] == "changed"


def test_tags_are_shuffled_and_some_left_out_by_the_key_alone():
    tags = [f"t{i}" for i in range(10)]
    found = [tag_captions(tags, 3, f"k{i}") for i in range(40)]
    assert found == [tag_captions(tags, 3, f"k{i}") for i in range(40)] and len({c for row in found for c in row}) > 100
    counts = [len(caption.split(", ")) for row in found for caption in row]
    assert all(len({*c.split(", ")}) == n for c, n in zip((c for row in found for c in row), counts))
    assert abs(sum(counts) - 0.7 * 1200) < 5 * (0.7 * 0.3 * 1200) ** 0.5 and min(counts) >= 1
    assert tag_captions(["one"], 2, "k") == ["one", "one"] and tag_captions([], 2, "k") == []


def test_bytes_do_not_depend_on_threads_or_on_what_was_done_before(tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    whole.mkdir()
    part.mkdir()
    source, plans = Source([1, 2, 0, 1, -1, 1, 3, 1]), plans_of(8, 3)
    first = encode(whole, source, plans, workers=4)
    last = encode(part, source, plans[1:], workers=1)
    assert [r.sha256 for r in first[1:]] == [r.sha256 for r in last]


def test_faults_are_drops_with_key_and_reason_and_clips_before_them_stay(tmp_path):
    (record,) = encode(tmp_path, Source([2, -1, 0, 1]), plans_of(4, 4))
    assert record.samples == 4
    assert [(d["key"], d["reason"]) for d in record.drops] == [("item-1", "bad_end"), ("item-2", "no_clips")]


def test_unexpected_faults_and_repeated_keys_are_drops_and_an_empty_shard_has_no_tar(tmp_path):
    source = Source([1, 1, 1, 1])
    read = source.read

    def broken(index):
        if index == 2:
            raise OSError("disk")
        yield from read(0)

    source.read = broken
    first, second = encode(tmp_path, source, plans_of(4, 2)[:1] + [ShardPlan("rank0-000001.tar", "train", (2,))])
    assert first.samples == 1 and [d["reason"] for d in first.drops] == ["duplicate_key"]
    assert second.samples == 0 and second.drops[0]["key"] == "item-2" and "disk" in second.drops[0]["detail"]
    assert [p.name for p in tmp_path.glob("*.tar")] == ["rank0-000000.tar"]


def test_long_shards_are_written_in_slices_with_the_same_content(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "SLICE_SAMPLES", 4)
    text = Length()
    (record,) = encode(tmp_path, Source([1] * 11), plans_of(11, 11), text=text)
    entries = shards.samples_of(tmp_path / record.name)
    assert [e.key for e in entries] == [f"item-{i}-0" for i in range(11)]
    assert text.calls == [["caption 0", "caption 1", "caption 2"]]
    sums = np.array(record.latent_sums)
    values = np.array([e.read().latent.double().numpy() for e in entries])
    np.testing.assert_allclose(sums[:, 0], [values[:, 0, 0].size, values[:, 0, 0].sum(), (values[:, 0, 0] ** 2).sum()])


def test_reading_ahead_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(encoding, "AHEAD_BYTES", 5 * 16 * 16 * 3)
    with encoding.ReadAhead(encoding.Reading(Source([3] * 30), workers=4), range(30)) as ahead:
        taken = ahead.take(30)
        keys = [next(taken)[1].key for _ in range(2)]
        time.sleep(0.2)
        held = sum(len(line.waiting) for line in ahead._lines)
        keys += [r.key for _, r in taken]
    assert held <= 5 + 4 + 64  # the budget, one clip a thread, and the marks of ended items
    assert [k for k in keys if isinstance(k, str)] == keys == [f"item-{i}-{j}" for i in range(30) for j in range(3)]


def test_fault_of_an_encoder_ends_the_run_and_leaves_no_shard(tmp_path, monkeypatch):
    """At the second slice of a shard."""

    class Broken(Mean):
        def encode(self, video):
            if self.batches:
                raise RuntimeError("no memory")
            return super().encode(video)

    monkeypatch.setattr(encoding, "SLICE_SAMPLES", 4)
    (tmp_path / shards.RECORDS).mkdir()
    with pytest.raises(RuntimeError, match="no memory"):
        encode(tmp_path, Source([1] * 40), plans_of(40, 40), Broken())
    assert not list(tmp_path.glob("*.t*")) and not list((tmp_path / shards.RECORDS).iterdir())


def test_batch_that_does_not_fit_the_device_is_halved(tmp_path):
    class Small(Mean):
        def encode(self, video):
            if len(video) > 3:
                raise torch.OutOfMemoryError("out of memory")
            return super().encode(video)

    (record,) = encode(tmp_path, Source([1] * 10), plans_of(10, 10), Small())
    values = [e.read().latent[0, 0, 0, 0, 0].item() for e in shards.samples_of(tmp_path / record.name)]
    np.testing.assert_allclose(values, [i / 127.5 - 1 for i in range(10)], atol=4e-3)


def test_a_clip_is_resized_once_and_cut_to_whole_latents(monkeypatch):
    """To which sizes: tests/base/test_video.py."""
    calls = []
    resize = lambda v, h, w, fit: (calls.append((h, w)), np.zeros((len(v), h, w, 3), np.uint8))[1]  # noqa: E731
    monkeypatch.setattr(encoding.video, "resize", resize)
    fitted = encoding.Reading(Source([]), 64, True).fitted(Clip("k", black(7, 40, 48), "c", 1.0, "s"))
    assert fitted.video.shape == (5, 64, 80, 3) and calls == [(64, 80)] and fitted.original_size == (40, 48)
    whole = Clip("k", black(1, 64, 96), "c", 1.0, "s")
    assert encoding.Reading(Source([]), None, False).fitted(whole).video.shape == (1, 64, 96, 3)


@pytest.mark.parametrize("fit, lost", [("crop", ["cropped_over_5%"]), ("pad", [])])
def test_a_picture_that_loses_much_is_named(fit, lost):
    for width, found in ((104, lost), (96, []), (100, [])):  # 64 x 112, 96 and 96
        clip = Clip("k", black(1, 64, width), "c", 1.0, "s")
        assert list(encoding.Reading(Source([]), fit=fit).fitted(clip).lost) == found
