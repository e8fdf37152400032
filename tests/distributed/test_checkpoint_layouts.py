"""A checkpoint written in one layout holds the same weights, optimizer state and averages for every other one."""

import pytest
import torch
import torch.distributed as dist

from dfm_nb.checkpoints import folders, saving
from tests.conftest import run_ranks
from tests.distributed.layouts import (
    LAYOUTS,
    MUON,
    by_name,
    gather,
    largest_relative_difference,
    local_values,
    make_trainer,
    randomise,
)
from tests.networks import cases
from tests.tiny_run import VARIANTS


def contents(trainer):
    """Whole tensors by name: weights, averages, and the weights after one more step."""
    weights = local_values(trainer, "weight")
    averages = [average.clone() for named in trainer.ema.named(0.1) for average in named.values()]
    averages = [(f"ema {name}", a, dim, rank) for (name, _, dim, rank), a in zip(weights, averages, strict=True)]
    return gather([*weights, *averages]) | {f"step {k}": v for k, v in after_one_more_step(trainer).items()}


def after_one_more_step(trainer):
    """The weights after a step with gradients that depend on the name only: they show main weights and moments."""
    for chunk in trainer.ddp:
        chunk.zero_grad_buffer()
    for _, p, draw in by_name(trainer, "gradient"):
        p.main_grad.copy_(draw(1e-2))
    trainer.optimizer.prepare_grads()
    trainer.optimizer.step_with_ready_grads()
    return gather(local_values(trainer, "weight"))


ALL = {"1": (1, [])}
ALL |= {name: LAYOUTS[name] for name in ("TP2", "CP2", "PP2 virtual", "DP2", "DP2 distributed optimizer")}


def write(layouts, extra, root):
    """One training step in each layout, then saves of the same state, and a plain copy of it."""
    for name, overrides in layouts.items():
        trainer, loader = make_trainer([*overrides, *extra])
        randomise(trainer)
        trainer.step(loader.next_step())
        (root / name).mkdir(parents=True, exist_ok=True)
        writer = saving.Writer(root / name, asynchronous=name == "TP2")
        writer.save(trainer.pieces(), 1, {"iteration": 1}, "model: {}\n")
        writer.close()
        whole = contents(trainer)
        if dist.get_rank() == 0:
            torch.save(whole, root / f"{name}.pt")


def read(layouts, extra, root, saved):
    """{(saved, loaded): names of tensors that differ, and by how much at most}."""
    found = {}
    for loaded, overrides in layouts.items():
        trainer, _ = make_trainer([*overrides, *extra, "rng.seed=99"])
        for name in saved:  # each replaces all of the one before, and of the step after it
            trainer.scheduler.num_steps = 0  # loading adds to it
            assert saving.load(trainer.pieces(), folders.find(root / name)) == {"iteration": 1}
            got, want = contents(trainer), torch.load(root / f"{name}.pt", weights_only=True)
            assert got.keys() == want.keys()
            differing = [k for k in want if not torch.equal(got[k], want[k])]
            found[name, loaded] = differing, largest_relative_difference(got, want)[0]
    return found


def pairs(saved, loaded, extra, root):
    """If one process is among them, it reads what each layout has saved, and the others read the first and the last:
    files hold whole tensors, and a reader does not know who wrote them.
    """
    for world in (1, 2):
        of = {name: given[1] for name, given in ALL.items() if given[0] == world}
        run_ranks(world, write, {name: of[name] for name in saved if name in of}, extra, root)
    found = {}
    for world in (1, 2):
        of = {name: given[1] for name, given in ALL.items() if given[0] == world}
        some = saved if world == 1 or "1" not in saved else saved[:1] + saved[-1:]
        found |= run_ranks(world, read, {name: of[name] for name in loaded if name in of}, extra, root, some)[0]
    return found


@pytest.mark.slow
def test_checkpoint_of_any_layout_is_the_same_in_any_other(tmp_path):
    """The optimizer's part as the difference that one more step makes, bit for bit."""
    found = pairs(list(ALL), list(ALL), ["mixed_precision=fp32", "optimizer.clip_grad=0"], tmp_path)
    assert not any(differing for differing, _ in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["muon", *cases("TINY", {})])
def test_checkpoint_of_other_networks_and_optimizers(tmp_path, kind):
    """Muon's sums depend on the layout, so its step is compared to rounding."""
    extra = [*MUON, "mixed_precision=fp32"] if kind == "muon" else [*VARIANTS[kind], "mixed_precision=bf16"]
    extra.append("optimizer.clip_grad=0")
    some = ["CP2" if kind == "muon" else "DP2 distributed optimizer", "TP2", "PP2 virtual"]
    for differing, most in pairs(some, some, extra, tmp_path).values():
        assert not [name for name in differing if kind != "muon" or not name.startswith("step ")]
        assert most < 1e-5
