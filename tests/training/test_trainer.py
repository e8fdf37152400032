from dataclasses import replace

import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb.base.metrics import read_metrics
from dfm_nb.checkpoints.folders import checkpoints_of
from dfm_nb.packs.packs import CLEAN_SIGMA
from dfm_nb.training.batches import open_store
from dfm_nb.training.validation import Validation
from tests.distributed.layouts import (
    BASE,
    MUON,
    largest_relative_difference,
    losses_and_gradients,
    make_trainer,
    randomise,
)
from tests.refusals import refused
from tests.tiny_run import VARIANTS

SMALL = ["model.num_layers=2", "train.global_batch_size=2"]


def weights(trainer):
    return [p.detach().clone() for c in trainer.chunks for p in c.parameters()]


def test_tokens_outside_the_loss_give_no_gradient(one_rank):
    """Padding here, as no samples fill 97 tokens; other values in it leave the loss and every gradient as they were."""
    trainer, loader = make_trainer([*SMALL, "dataset.task_encoder_seq_length=97"])
    randomise(trainer)
    packs, found = loader.next_step(), []
    assert not any(pack.loss_mask.all() for pack in packs)
    for _ in range(2):
        loss = trainer.backward(packs)
        found.append([loss, *(p.main_grad.clone() for p in trainer.chunks[0].parameters())])
        for pack in packs:
            pack.x0[~pack.loss_mask] += 1
    assert all(map(torch.equal, *found))


def test_weights_of_tokens_scale_gradients_and_not_the_loss_that_is_reported(one_rank):
    trainer, loader = make_trainer([*SMALL, "train.first_frame_share=0.8"])
    randomise(trainer)
    packs, found = loader.next_step(), []
    assert {round(w, 4) for pack in packs for w in pack.weight.tolist()} > {1.0, 4.0}
    for _ in range(2):
        loss = trainer.backward(packs)
        found.append([loss, *(p.main_grad.clone() for p in trainer.chunks[0].parameters())])
        for pack in packs:
            pack.weight = pack.weight * 2
    (loss, *before), (same, *after) = found
    assert torch.equal(loss, same) and any(g.any() for g in before)
    assert all(torch.equal(2 * a, b) for a, b in zip(before, after))
    assert torch.equal(trainer.backward([replace(pack, weight=pack.weight * 0) for pack in packs]), loss)
    assert not any(p.main_grad.any() for p in trainer.chunks[0].parameters())


def kept_by_the_optimizer(trainer):
    """Float32 weights, moments and step counts."""
    parts = [part.optimizer for part in trainer.optimizer.chained_optimizers]
    values = [p for part in parts for group in part.param_groups for p in group["params"]]
    values += [v for part in parts for state in part.state.values() for v in state.values()]
    return [v.detach().clone() for v in values]


@pytest.mark.parametrize("optimizer", [[], MUON], ids=["adam", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_step_with_nan_changes_nothing_and_says_so(one_rank, optimizer, precision):
    trainer, loader = make_trainer([*SMALL, *optimizer, f"mixed_precision={precision}"])
    trainer.step(loader.next_step())
    before, taken = weights(trainer), trainer.steps_taken
    kept = kept_by_the_optimizer(trainer)
    averages = [a.clone() for a in trainer.ema.averages[0.1]]
    packs = loader.next_step()
    packs[0].x0[0, 0] = float("nan")
    assert trainer.step(packs).skipped and trainer.steps_taken == taken
    assert all(map(torch.equal, kept, kept_by_the_optimizer(trainer)))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer)))
    assert all(torch.equal(a, b) for a, b in zip(averages, trainer.ema.averages[0.1]))
    assert not trainer.step(loader.next_step()).skipped
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(trainer)))


def test_validation_is_of_whole_samples_at_quantiles_of_the_times_that_are_trained(one_rank):
    asked = "model.objective=flow model.times=uniform model.P_mean=0 model.P_std=1 train.eval_iters=1".split()
    trainer, loader = make_trainer([*SMALL, *asked, "dataset.condition_frames_prob=1"])
    validation = Validation(trainer.config, trainer, loader.order.store, loader.order.settings)
    assert all(pack.loss_mask.sum() == pack.num_tokens for pack in validation.packs), "no frame is given"
    sigmas = validation.run()["val_sigmas"]
    assert [s / (1 + s) for s in sigmas] == pytest.approx([(i + 0.5) / len(sigmas) for i in range(len(sigmas))])


def test_validation_noises_each_sample_once_and_nothing_that_is_given(one_rank):
    trainer, loader = make_trainer([*SMALL, "given", "train.eval_iters=4"])
    validation = Validation(trainer.config, trainer, loader.order.store, loader.order.settings)

    def levels(free):
        return torch.cat([p.sigma[torch.unique(p.row[p.loss_mask == free])] for p in validation.packs])

    used, counts = levels(True).unique(return_counts=True)
    assert torch.equal(used, validation.sigmas.sort()[0]) and counts.max() - counts.min() <= 1
    assert set(levels(False).tolist()) <= set(torch.tensor([CLEAN_SIGMA, 0.5]).tolist()), "or padding"
    assert (levels(False) == CLEAN_SIGMA).sum() > len(validation.packs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gradient_reaches_every_tensor(one_rank, variant):
    trainer, loader = make_trainer([*SMALL, *VARIANTS[variant]])
    randomise(trainer)
    trainer.backward(loader.next_step())
    assert not [name for name, p in trainer.chunks[0].named_parameters() if not p.main_grad.any()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_trains_as_fp32_to_its_rounding(one_rank, variant):
    asked = ([*SMALL, *VARIANTS[variant], f"mixed_precision={name}"] for name in ("bf16", "fp32"))
    narrow, wide = map(losses_and_gradients, asked)
    assert narrow["losses"] == pytest.approx(wide["losses"], rel=0.01) and narrow["losses"] != wide["losses"]
    difference, where = largest_relative_difference(narrow["gradients"], wide["gradients"])
    assert difference < 0.05, where


def begun(folder, *overrides):
    """A run that has not made a step yet."""
    from dfm_nb.base.run import Run
    from dfm_nb.training.loop import Training

    resolved = cfg.resolve(None, overrides=[*BASE, *SMALL, "model.sigma_data=0.5", "logger.report_to=[]", *overrides])
    run = Run.create(folder)
    run.checkpoints.mkdir()
    training = Training(resolved, run, open_store(resolved.config))
    training.resume()
    return training


def test_skipped_steps_are_listed_and_too_many_end_the_run(tmp_path, one_rank):
    training = begun(tmp_path, "train.max_skipped_steps=1")
    with torch.no_grad():
        training.trainer.chunks[0].x_embedder.weight[0, 0] = float("nan")
    refused("skipped.jsonl", training.run)
    assert (tmp_path / "skipped.jsonl").read_text().count("mock") > 2
    assert [r["skipped"] for r in read_metrics(tmp_path)] == [1, 2]


def test_checkpoints_of_skipped_steps_replace_none(tmp_path, one_rank):
    """Steps 3 to 5 are NaN, and the run ends in them: no save is made on the way, and the last one removes none."""
    training = begun(tmp_path, "train.eval_interval=0", "checkpoint.save_interval=1", "checkpoint.keep_last=1")
    step = training.trainer.step

    def failing(packs):
        if training.iteration >= 2:
            packs[0].x0[:] = float("nan")
        return step(packs)

    training.trainer.step = failing
    training.run()
    assert [path.name for path in checkpoints_of(tmp_path)] == ["iter_0000002", "iter_0000005"]
    training._compare({"val_loss": float("nan")})
    assert training.best is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_settings_changed_before_resuming_are_applied(tmp_path, one_rank, kind):
    """Every group's learning rate, decay, betas and epsilon are those of a run that always had the new settings."""
    from dfm_nb.checkpoints import saving

    distributed = f"optimizer.use_distributed_optimizer={str(kind == 'adam').lower()}"
    old = [*SMALL, f"optimizer.optimizer={kind}", distributed, "train.train_iters=100"]
    new = [*old, "optimizer.lr=0.02", "optimizer.min_lr=0.001", "optimizer.weight_decay=0.3", "optimizer.adam_eps=1e-6"]
    new += ["optimizer.adam_beta1=0.7", "optimizer.adam_beta2=0.9", "train.train_iters=20"]
    new += ["scheduler.lr_warmup_iters=5", "scheduler.lr_decay_style=linear"]
    trainer, loader = make_trainer(old)
    for _ in range(7):
        trainer.step(loader.next_step())
    writer = saving.Writer(tmp_path, 0, None, False)
    writer.save(trainer.pieces(), 7, {"iteration": 7}, "", {})
    writer.close()
    resumed, _ = make_trainer(new)
    saving.load(resumed.pieces(), tmp_path / "iter_0000007")
    always, _ = make_trainer(new)
    always.scheduler.step(increment=7)
    groups = resumed.optimizer.param_groups
    assert len(groups) == len(always.optimizer.param_groups) > 0
    for got, want in zip(groups, always.optimizer.param_groups):
        for name in ("lr", "weight_decay", "betas", "eps", "max_lr", "min_lr"):
            assert got.get(name) == want.get(name), name
    assert groups[0]["lr"] == pytest.approx(0.001 + 0.019 * 13 / 15)  # linear from 5 to 20, at 7
    states = [s for part in resumed.optimizer.chained_optimizers for s in part.optimizer.state.values()]
    assert any(s["exp_avg"].abs().max() > 0 for s in states if "exp_avg" in s)  # the state itself is the checkpoint's
