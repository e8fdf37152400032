"""The loader: exact tokens, frequencies, ranks, resumption, caches; and a model that learns from it."""

import os

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dfm_nb.base.run import turn
from dfm_nb.text import mixture as tm
from dfm_nb.text.blend import BatchSampler, TokenizerIds, _require_tokens, batches, build_datasets
from dfm_nb.text.indexed import Index
from tests.refusals import refused
from tests.text.corpora import words_of, write_pair

pytestmark = pytest.mark.usefixtures("one_rank")
EOD = 0
TOKENIZER = TokenizerIds(1000, EOD, name="test")


def corpus(path, first: int, documents: int = 40, seed: int = 0) -> str:
    """Documents of ids first .. first + 99, each ended by the EOD, so that a token tells its corpus."""
    rng = np.random.default_rng(seed)
    docs = [[np.append(rng.integers(first, first + 100, rng.integers(3, 40)), EOD)] for _ in range(documents)]
    write_pair(path, docs, np.uint16)
    return str(path)


@pytest.fixture
def prefixes(tmp_path):
    return [corpus(tmp_path / name, first, seed=first) for name, first in (("a", 100), ("b", 200), ("c", 300))]


def build(blend, tmp_path, n=200, tokenizer=TOKENIZER, **changes):
    usual = {"seq_length": 16, "num_samples": (n, 0, 0), "cache_dir": str(tmp_path / "cache")}
    return build_datasets(blend, tokenizer=tokenizer, **(usual | changes))


def blend_of(prefixes, weights):
    return tm.parse_list(words_of(weights, prefixes))


def tokens(data, count):
    return torch.stack([data[i]["tokens"] for i in range(count)])


def stream(index: Index, order: np.ndarray) -> np.ndarray:
    sequences = np.split(index.tokens(), np.cumsum(index.lengths)[:-1])
    return np.concatenate([sequences[i] for i in order])


def test_samples_hold_the_expected_tokens(prefixes, tmp_path):
    """Every sample of one epoch, rebuilt from the corpus in megatron's document order: seq_length + 1 tokens, step
    seq_length."""
    index = Index.open(prefixes[0])
    n = (index.num_tokens - 1) // 16
    data = build(blend_of(prefixes[:1], [1.0]), tmp_path, n)["train"]
    text = stream(index, data.document_index)
    assert sorted(data.document_index) == list(range(40)) and len(data) == n
    for i in range(n):
        at = 16 * int(data.shuffle_index[i])
        assert data[i]["tokens"].tolist() == text[at : at + 16].tolist()
        assert data[i]["labels"].tolist() == text[at + 1 : at + 17].tolist()


def test_split_cuts_each_corpus_without_overlap(tmp_path):
    """With unique tokens per document, train, validation and test share none."""
    docs = [[np.append(np.full(20, 10 + i), EOD)] for i in range(100)]
    write_pair(tmp_path / "u", docs, np.uint16)
    blend = tm.parse_list(["1.0", str(tmp_path / "u")])
    data = build(blend, tmp_path, num_samples=(100, 12, 12), split="80,10,10")
    seen = {s: {int(t) for i in range(len(d)) for t in d[i]["tokens"]} - {EOD} for s, d in data.items()}
    assert 78 <= len(seen["train"]) <= 80 and seen["validation"] and seen["test"]
    assert not (seen["train"] & seen["validation"] or seen["train"] & seen["test"] or seen["validation"] & seen["test"])


def test_ranks_share_the_samples_and_resumption_goes_on(prefixes, tmp_path):
    data = build(blend_of(prefixes, [0.5, 0.3, 0.2]), tmp_path, 64)["train"]
    whole = tokens(data, 64)

    def of_rank(size, *consumed_rank_ranks):
        sampler = BatchSampler(len(data), size, *consumed_rank_ranks)
        return [b["tokens"] for b in DataLoader(data, batch_sampler=sampler)]

    per_rank = [of_rank(4, 0, r, 2) for r in range(2)]
    joined = [row for a, b in zip(*per_rank) for row in torch.cat([a, b])]
    assert all(torch.equal(x, y) for x, y in zip(whole, joined, strict=True))
    resumed = of_rank(4, 24, 1, 2)
    assert all(torch.equal(x, y) for x, y in zip(resumed, per_rank[1][3:], strict=True))
    other_layout = [row for b in of_rank(8, 24, 0, 1) for row in b]
    for ours, theirs in zip(batches(data, 8, 24), of_rank(8, 24, 0, 1), strict=True):
        assert torch.equal(ours["tokens"], theirs), "this process is the only rank"
    assert all(torch.equal(x, y) for x, y in zip(other_layout, whole[24:], strict=True))


def test_a_replaced_corpus_does_not_meet_an_old_cache(prefixes, tmp_path):
    blend = blend_of(prefixes[:1], [1.0])
    build(blend, tmp_path, 20)
    corpus(prefixes[0], 500, documents=55, seed=9)
    data = build(blend, tmp_path, 20)["train"]
    assert all(bool(((data[i]["tokens"] >= 500) | (data[i]["tokens"] == EOD)).all()) for i in range(20))
    assert set(data.document_index) == set(range(55))


def test_a_killed_build_leaves_nothing_that_a_later_one_reads(prefixes, tmp_path, monkeypatch):
    """Stopped before each array is saved; then one is replaced by a pickle, which is data of somebody else."""
    blend, save, left = blend_of(prefixes[:2], [0.5, 0.5]), np.save, [0]

    def stopping(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return save(*args, **kwargs)

    monkeypatch.setattr(np, "save", stopping)
    for number in range(30):
        left[0] = number
        try:
            data = build(blend, tmp_path, 40)["train"]
            break
        except KeyboardInterrupt:
            (left_behind,) = (tmp_path / "cache").iterdir()  # and not those of before
            assert left_behind.name.endswith(".tmp")
    whole = tokens(data, 40)
    left[0] = 1000
    again = build(blend, tmp_path / "other", 40)["train"]
    assert number > 3 and torch.equal(whole, tokens(again, 40))
    (folder,) = (tmp_path / "cache").iterdir()
    first = min(folder.glob("*.npy"))
    np.savez(tmp_path / "a", np.array([{}]))

    def replaced(make) -> None:
        first.unlink()
        make()
        refused(first.name, build, blend, tmp_path, 40)

    replaced(lambda: save(first, np.array([{}]), allow_pickle=True))
    replaced(lambda: os.link(tmp_path / "a.npz", first))  # numpy tells its forms by their content
    replaced(lambda: os.mkfifo(first))


@pytest.mark.parametrize("theirs", ["link", "indices", "file"])
def test_a_cache_of_another_user_is_rebuilt_in_our_own(prefixes, tmp_path, monkeypatch, given_away, theirs):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    blend = blend_of(prefixes[:1], [1.0])
    data = build(blend, tmp_path, 20, cache_dir=None)["train"]
    whole = tokens(data, 20)
    (indices,) = (tmp_path / ".blend_cache").iterdir()
    first = min(indices.glob("*.npy"))
    np.save(first, np.zeros_like(np.load(first)))
    if theirs == "link":
        (tmp_path / ".blend_cache").rename(tmp_path / "away")
        (tmp_path / ".blend_cache").symlink_to("away")
    named = {"link": tmp_path / ".blend_cache", "indices": indices, "file": first}[theirs]
    given_away(named)
    first = first.resolve() if theirs != "link" else tmp_path / "away" / indices.name / first.name
    before = first.stat()
    for _ in range(2):  # built, then found
        data = build(blend, tmp_path, 20, cache_dir=None)["train"]
        assert torch.equal(tokens(data, 20), whole)
    assert len([*(tmp_path / "home/.cache/dfm_nb/blends").iterdir()]) == 1 and first.stat() == before
    build(blend, tmp_path, 20)
    assert len([*(tmp_path / "cache").iterdir()]) == 1


def test_only_a_folder_that_a_killed_build_left_is_removed(prefixes, tmp_path):
    cache = tmp_path / "cache"
    names = ("mine.tmp", ".my.00000000.tmp")
    held, dead = (cache / f".{'0' * 16}.{number * 8}.tmp/lock" for number in "12")
    for lock in (held, dead, *(cache / name / "lock" for name in names)):
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock.touch()
    with turn(held, ""):
        build(blend_of(prefixes[:1], [1.0]), tmp_path, 20)
    assert not dead.exists() and held.exists() and len([*cache.iterdir()]) == 4


def test_faults_of_a_blend_are_named_before_building(prefixes, tmp_path):
    blend = blend_of(prefixes[:1], [1.0])
    refused(".meta.json", build, blend, tmp_path, tokenizer=None)
    refused("seq_length", build, blend, tmp_path, seq_length=100_000)
    refused("969,30,1 leaves test 0", build, blend, tmp_path, num_samples=(20, 4, 4), split="969,30,1")
    refused("90,5,5,5", _require_tokens, tm.Blend(()), 8, (1, 1, 1), "90,5,5,5")
    refused("micro_batch_size", BatchSampler, 10, 2, 3, 0, 2)
    with open(f"{prefixes[0]}.bin", "ab") as f:
        f.write(b"xx")
    refused(prefixes[0], build, blend, tmp_path)
