"""One number of minutes settles a run once; what is settled is an ordinary configuration."""

import math
import re
import time

import numpy as np
import pytest

from dfm_nb import config as cfg
from dfm_nb import export_weights, prepare_dataset, train_model
from dfm_nb.checkpoints.folders import read_manifest
from dfm_nb.checkpoints.loading import find_weights
from dfm_nb.data.stores import MockStore, ShardStore
from dfm_nb.planner import minutes as dial
from dfm_nb.training.batches import with_data
from dfm_nb.training.report import epoch_tokens, expected
from tests.tiny_run import SIZE

pytestmark = pytest.mark.slow

SMALL = [o for o in SIZE if not o.startswith(("train.train_iters", "train.eval_interval"))]


def losses(run) -> list[float]:
    return run.metrics["loss"].dropna().tolist()


def test_minutes_settle_a_run_that_its_configuration_repeats(tiny_data, tmp_path):
    asked = dict(
        dataset_path=tiny_data,
        recipe="own",
        overrides=[*SMALL, "validation.samples=false", "train.exit_duration_s=null"],
    )
    run = train_model(run_dir=tmp_path / "own", minutes=0.02, **asked)
    settled, iterations = run.config.config, len(losses(run))
    assert settled.train.train_iters == iterations >= 8 and iterations % 8 == 0
    assert settled.checkpoint.save_interval == settled.train.eval_interval == iterations // 8
    assert len(list((run.path / "checkpoints").glob("iter_*"))) == 8
    assert settled.model.hidden_size == 48, "what a user has set stays"
    assert clip_share(settled, ShardStore(tiny_data)) == pytest.approx(dial.CLIP_SHARE, abs=0.01)
    assert settled.train.first_frame_share == dial.FIRST_SHARE
    known = find_weights(run.path).config.samples.anchors
    assert known and "generation.anchor" in run.config.provenance
    assert find_weights(export_weights(run.path, tmp_path / "own.safetensors")).config.samples.anchors == known
    # the machine is measured once: the same command has nothing left to do
    again = train_model(run_dir=tmp_path / "own", minutes=0.02, **asked)
    assert len(losses(again)) == iterations
    # the iterations that were timed have left nothing behind
    plain = train_model(run_dir=tmp_path / "plain", dataset_path=tiny_data, config_file=_plain(run, tmp_path))
    assert losses(plain) == losses(run)
    # a run that began before there was this setting resumes without it
    settings = (tmp_path / "own" / "config.yaml").read_text().splitlines()
    (tmp_path / "own" / "config.yaml").write_text("\n".join(s for s in settings if "first_frame_share" not in s))
    old = train_model(run_dir=tmp_path / "own", minutes=0.02, **asked)
    assert old.config.config.train.first_frame_share == 0


@pytest.fixture
def settled(one_rank, monkeypatch):
    """The training that minutes give, of samples of a size, where an iteration takes so many seconds and tokens."""

    def settle(minutes, grid, iteration, passed_s=0):
        monkeypatch.setattr(dial, "_iteration", lambda *_: iteration)
        asked = cfg.resolve("own", overrides=[f"train.minutes={minutes}"])
        return dial.of_rate(asked, MockStore([grid], length=10), time.monotonic() - passed_s).config.train

    return settle


def test_minutes_that_are_over_before_training_begins_still_give_a_run(settled):
    t = settled(1, (1, 8, 8), (1.3, 2_000), passed_s=100)
    assert t.train_iters == 8 and t.exit_duration_s > 8 * 1.3


def clip_share(config, store) -> float:
    tokens = store.voxels(slice(None)) * store.weights(config.dataset.clip_weight)
    return tokens[store.of_kind(still=False)].sum() / tokens.sum()


def test_samples_with_the_latents_of_the_packaged_base_are_trained_from_it(tmp_path, monkeypatch):
    source = find_weights(dial.BASE)
    same = read_manifest(source.folder)["tokenizer"]["name"]
    for tokenizer in (same, "pca"):
        prepare_dataset(source="drawings", output_dir=tmp_path / tokenizer, tokenizer=tokenizer, limit=6)

    def start(tokenizer: str, *overrides: str, store=None) -> tuple:
        asked = ["train.minutes=5", f"dataset.path={tmp_path / tokenizer}", *overrides]
        clips = store is not None
        store = store or ShardStore(tmp_path / tokenizer)
        config = dial.of_data(with_data(cfg.resolve("own", overrides=asked), store), store, 1).config
        assert config.train.first_frame_share == clips * dial.FIRST_SHARE
        return config.checkpoint.pretrained, config.model.num_layers

    assert start(same) == (dial.BASE, source.config.model.num_layers)
    assert start(same, "checkpoint.pretrained=null") == start("pca") == (None, 4)
    for other in ("model.hidden_size=48", "model.qk_layernorm=false", "checkpoint.load_checkpoint=a"):
        assert start(same, other)[0] is None, "another network, or weights of one's own"
    assert start(same, store=MockStore([(1, 8, 8), (3, 8, 8)]))[0] is None, "as many clips as pictures"
    mixed = MockStore([(1, 8, 8), (1, 8, 8), (3, 8, 8)], length=300)
    assert start(same, store=mixed)[0] == dial.BASE

    def settled(store, passes: float) -> str | None:
        asked = ["train.minutes=5", f"dataset.path={tmp_path / same}"]
        c = dial.of_data(with_data(cfg.resolve("own", overrides=asked), store), store, 1).config
        step = c.train.global_batch_size * c.dataset.task_encoder_seq_length
        asked.append(f"train.train_iters={round(passes * np.concatenate(epoch_tokens(c, store)).sum() / step)}")
        resolved = with_data(cfg.resolve("own", overrides=asked), store)
        return dial.settings(resolved, store, 1, 0).config.checkpoint.pretrained

    assert settled(ShardStore(tmp_path / same), 1.2 * dial.BASE_PASSES) == dial.BASE
    assert [settled(mixed, n * dial.CLIP_PASSES) for n in (0.9, 1.2)] == [None, dial.BASE]

    monkeypatch.setattr(dial, "_iteration", lambda *_: (2.0, 100))
    monkeypatch.setattr(dial, "ROUNDS", 1)
    monkeypatch.setattr(dial, "BASE_PASSES", 0)

    def trained(name: str, *overrides: str, minutes: float = 0.05):
        asked = ["validation.samples=false", "train.eval_iters=1", *overrides]
        return train_model(run_dir=tmp_path / name, dataset_path=tmp_path / same, minutes=minutes, overrides=asked)

    run, again = trained("run"), trained("run")
    assert run.config.config.checkpoint.pretrained == again.config.config.checkpoint.pretrained == dial.BASE
    assert "Started from the weights of drawings" in (tmp_path / "run" / "log.txt").read_text()
    monkeypatch.setattr(dial, "BASE_PASSES", 1e9)
    assert trained("short").config.config.checkpoint.pretrained is None
    monkeypatch.setattr(dial, "BASE_PASSES", 0)
    longer = trained("short", minutes=0.1).config.config  # keeps its network
    assert (longer.checkpoint.pretrained, longer.model.num_layers) == (None, 4)
    assert longer.train.train_iters < 1000 and longer.train.exit_duration_s, "settled by the new minutes"
    for name, other in (("run", "null"), ("short", dial.BASE)):
        with pytest.raises(cfg.ConfigError, match="checkpoint.pretrained"):
            trained(name, f"checkpoint.pretrained={other}")


def test_what_the_time_buys_is_counted_in_uses_of_each_sample():
    store = MockStore([(1, 8, 8)] * 9 + [(9, 8, 8)], length=100)
    config = cfg.Config()
    config.dataset.clip_weight = 1 / 3
    epoch = 16 * (90 + 90 / 3)  # tokens
    assert re.findall(r"\d+", expected(config, store, 24 * epoch)) == ["24", "8", "25", "35"]


@pytest.mark.parametrize("grid, rounds", [((1, 8, 8), 8), ((13, 12, 12), 4)])
def test_iterations_and_the_samples_of_validations_fit_into_the_minutes(settled, grid, rounds):
    """1.3 s for 2,000 tokens; four samples of 16 forwards are 21 trainings of a sample, of 468 tokens 6.5 s."""
    t = settled(2, grid, (1.3, 2_000))
    samples_s = rounds * 4 * 16 / 3 * math.prod(grid) / 4 * 1.3 / 2_000
    assert t.train_iters == rounds * t.eval_interval and samples_s < 30
    assert 120 - 2 * 1.3 * rounds < t.train_iters * 1.3 + samples_s + 0.06 * 120 <= 120


def test_one_round_of_long_samples_leaves_three_quarters_of_the_minutes_to_training(settled):
    t = settled(1, (13, 12, 12), (1.0, 100))
    assert t.train_iters == t.eval_interval and 39 <= t.train_iters <= 41


def _plain(run, folder):
    """The same settings without the minutes, all of them as a user would have set them."""
    config = run.config.config
    config.train.minutes = config.train.exit_duration_s = None
    (folder / "plain.yaml").write_text(config.model_dump_json())
    return folder / "plain.yaml"


def test_the_best_checkpoint_stays_and_its_turn_is_said(tiny_data, tmp_path):
    settings = ["train.train_iters=5", "train.eval_interval=1", "checkpoint.save_interval=1", "checkpoint.keep_last=1"]
    settings += [
        "checkpoint.keep_best=true",
        "optimizer.optimizer=adam",
        "optimizer.lr=0.9",
        "validation.samples=false",
    ]
    run = train_model(dataset_path=tiny_data, run_dir=tmp_path, recipe="own", overrides=[*SMALL, *settings])
    rounds = run.metrics.dropna(subset="val_loss")
    best = int(rounds.loc[rounds["val_loss_ema_0.05"].idxmin(), "iteration"])
    assert best < 5, "such a learning rate does harm"
    kept = {int(folder.name[5:]) for folder in (tmp_path / "checkpoints").glob("iter_*")}
    assert kept == {best, 5}
    assert f"best at iteration {best}" in (tmp_path / "log.txt").read_text()
