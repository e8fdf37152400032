"""One bad sample is left out, named and counted wherever samples are read: it runs nothing and ends nothing."""

import json
from types import SimpleNamespace

import pytest
import torch

from dfm_nb import inspect
from dfm_nb.base.argv import guard
from dfm_nb.base.records import SampleError
from dfm_nb.data import shards
from dfm_nb.data.stores import ShardStore
from dfm_nb.measure.reference import ShardReference, choose
from dfm_nb.training.batches import packed_loader
from dfm_nb.training.loop import BadSamples
from tests.attacks.sample_files import CONTROLS, MARK, UNUSABLE, good_parts, spoil
from tests.distributed.layouts import make_trainer
from tests.json_files import read_json
from tests.refusals import refused
from workbench.browser import DatasetBrowser

SETTINGS = ["model.in_channels=16", "model.text_dim=384", "model.num_layers=2", "dataset.task_encoder_seq_length=160"]
STEPS = 3


@pytest.fixture(autouse=True)
def mark(tmp_path, monkeypatch):
    """Nothing of a sample runs in any of these tests."""
    monkeypatch.setenv(MARK, str(tmp_path / "ran"))
    yield
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def trainer():
    from dfm_nb import parallel

    trainer, _ = make_trainer([*SETTINGS, "train.global_batch_size=1"])
    yield trainer
    parallel.shutdown()


def train(trainer, folder):
    """What `dfm pretrain` does with a folder, for more steps than an epoch has."""
    store = ShardStore(folder)
    loader = packed_loader(trainer.config, store, 0, 1)
    bad = BadSamples(store, 0.01)
    losses, seen = [], set()
    for _ in range(STEPS):
        packs = loader.next_step()
        losses.append(trainer.step(packs).loss)
        bad.see(packs)
        bad.share()
        seen |= {key for pack in packs for key in pack.keys}
    return store, bad, losses, seen


@pytest.mark.parametrize("change", UNUSABLE.values(), ids=UNUSABLE)
def test_parts_alone_are_refused(change):
    parts = good_parts()
    change(parts)
    fault = refused(r"\bk7\b", shards.decode_sample, parts, "k7", shards.Fits(16, 384, (1, 4, 4)), error=SampleError)
    assert len(fault.detail) < 500
    assert not any(hasattr(f, "poison") for f in (torch._utils._rebuild_tensor_v2, torch.storage._load_from_bytes))


@pytest.mark.parametrize("change", CONTROLS.values(), ids=CONTROLS)
def test_what_other_writers_make_is_taken(change):
    parts, want = good_parts(), shards.decode_sample(good_parts(), "k7")
    change(parts)
    found = shards.decode_sample(parts, "k7", shards.Fits(16, 384, (1, 4, 4)))
    assert torch.equal(found.latent.float(), want.latent.float()) and torch.equal(found.text_emb, want.text_emb)


@pytest.mark.slow
@pytest.mark.parametrize("name, position", [("NaN latent", 0), ("code inside", 5), ("caption as list", 0)])
def test_every_reader_leaves_it_out_and_names_it(trainer, tmp_path, caplog, capsys, name, position):
    """One of each part; which samples are refused is tested above."""
    (key,) = spoil(tmp_path / "data", position, UNUSABLE[name])
    _, bad, losses, seen = train(trainer, tmp_path / "data")
    assert len(bad.found) == 1 and key in next(iter(bad.found)) and f"sample {key}" in caplog.text
    assert torch.tensor(losses).isfinite().all()
    assert len(seen) == 10 and key not in seen
    capsys.readouterr()
    assert guard(inspect.main, [str(tmp_path / "data"), "--verify", "--json", "--samples", "4"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["faults"]) == 1 and key in found["faults"][0], found["faults"]
    page = DatasetBrowser(tmp_path / "data").kept_html()
    assert page.count("<b>Damaged:</b>") == 1 and key in page
    manifest = read_json(tmp_path / "data" / "manifest.json")
    pixels = lambda z: z[:3].permute(1, 2, 3, 0).byte().numpy()  # noqa: E731
    pipe = SimpleNamespace(decode_stored=pixels, manifest=manifest)
    reference = ShardReference(str(tmp_path / "data"), "train", pipe)
    stills, clips, failed = choose(reference, 20, 20, 9, 0)
    assert len(stills) + len(clips) == 10 and len(failed) + len(reference.store.dropped) == 1


@pytest.mark.slow
def test_too_many_bad_samples_stop_a_run_with_examples(trainer, tmp_path):
    keys = spoil(tmp_path / "data", 2, UNUSABLE["NaN latent"], UNUSABLE["cut pickle"])
    error = refused("dataset.max_bad_fraction", train, trainer, tmp_path / "data")
    assert all(key in str(error) for key in keys)
    spoil(tmp_path / "json", 2, UNUSABLE["null json"])
    store = ShardStore(tmp_path / "json")
    BadSamples(store, 0.5)
    refused("dataset.max_bad_fraction", BadSamples, store, 0.0)


@pytest.mark.slow
def test_step_of_bad_samples_alone_is_skipped_and_changes_nothing(trainer, tmp_path):
    spoil(tmp_path / "data", 0, *[UNUSABLE["NaN latent"]] * 10)
    store, config = ShardStore(tmp_path / "data"), trainer.config.model_copy(deep=True)
    config.dataset.task_encoder_seq_length = max(t * h * w // 4 for t, h, w in map(store.grid, range(len(store))))
    loader = packed_loader(config, store, 0, 1)
    blank = 0
    for _ in range(6):
        packs = loader.next_step()
        before = [p.detach().clone() for p in trainer.chunks[0].parameters()]
        result = trainer.step(packs)
        if not packs[0].keys:
            blank += 1
            assert result.skipped and result.tokens == 0 and packs[0].dropped
            assert all(torch.equal(a, b) for a, b in zip(before, trainer.chunks[0].parameters()))
        else:
            assert not result.skipped
    assert blank


@pytest.mark.slow
def test_others_stay_where_they_are(trainer, tmp_path):
    """Packs with a sample that cannot be read hold the same others, in the same places, in any layout."""
    plain, bad = tmp_path / "plain", tmp_path / "bad"
    spoil(plain, 0)
    (key,) = spoil(bad, 4, UNUSABLE["NaN latent"])

    def packs(folder, rank=0, ranks=1, skip=0):
        config = trainer.config.model_copy(deep=True)
        config.train.global_batch_size = 2
        loader = packed_loader(config, ShardStore(folder), rank, ranks)
        if skip:
            before = packed_loader(config, ShardStore(folder), rank, ranks)
            for _ in range(skip):
                before.next_step()
            loader.restore(json.loads(json.dumps(before.state())))
        return [[[k for k in p.keys if k != key] for p in loader.next_step()] for _ in range(4)]

    whole = packs(plain)
    assert packs(bad) == whole
    assert [a + b for a, b in zip(packs(bad, 0, 2), packs(bad, 1, 2))] == whole
    assert packs(bad, skip=2)[:2] == whole[2:]
