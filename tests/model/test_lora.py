"""Low-rank updates: what they leave alone and add, and how they are exported (layouts: tests/distributed)."""

import pytest
import torch

from dfm_nb import export
from dfm_nb.checkpoints import exported, loading
from dfm_nb.diffusion.objective import EDM
from dfm_nb.model.denoiser import forward
from dfm_nb.model.linear import is_lora
from tests import tiny_run
from tests.distributed.layouts import make_trainer, randomise
from tests.refusals import refused

LORA = ["model.lora.rank=3", "model.lora.alpha=6"]
ALONE = ["train.global_batch_size=2", "model.num_layers=2"]


def tensors(chunk):
    return {name: p.detach().clone() for name, p in chunk.named_parameters()}


def output_of(chunk, pack):
    with torch.no_grad():
        return forward(chunk, pack, EDM(0.5), torch.device("cpu"))[0].float()


def test_new_updates_change_nothing(one_rank):
    plain, loader = make_trainer(ALONE)
    adapted, _ = make_trainer([*ALONE, *LORA])
    base, ours = tensors(plain.chunks[0]), tensors(adapted.chunks[0])
    assert all(torch.equal(base[n], ours[n]) for n in base)
    for chunk in (plain.chunks[0], adapted.chunks[0]):  # the output layers of a new model are zero
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, p in chunk.named_parameters():
                if not is_lora(name):
                    p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    (pack,) = loader.next_step()[:1]
    assert torch.equal(output_of(plain.chunks[0], pack), output_of(adapted.chunks[0], pack))


def test_only_updates_move(one_rank):
    trainer, loader = make_trainer([*ALONE, *LORA, "model.recompute_granularity=full"])
    randomise(trainer)
    before = tensors(trainer.chunks[0])
    losses = [trainer.step(loader.next_step()).loss for _ in range(3)]
    after = tensors(trainer.chunks[0])
    assert all(x == x for x in losses)
    assert all(torch.equal(before[n], after[n]) for n in before if not is_lora(n))
    assert all(not torch.equal(before[n], after[n]) for n in before if is_lora(n))
    assert {n for names in trainer.ema.named(0.1) for n in names} == {n for n in before if is_lora(n)}


@pytest.mark.slow
def test_exports_hold_the_base_and_what_two_tp_ranks_have_learnt(tiny_data, tiny_checkpoint, tmp_path):
    base, run = tiny_checkpoint, tmp_path / "run"
    settings = [f"checkpoint.pretrained={base}", "model.lora.rank=4", "model.lora.alpha=8", "train.train_iters=4"]
    settings += ["model.tensor_model_parallel_size=2", "checkpoint.save_interval=2", "checkpoint.keep_last=0"]
    tiny_run.train(tiny_data, run, *settings, ranks=2)
    read = lambda name: exported.read(tmp_path / name)[0]  # noqa: E731
    assert export.main([str(base), "--output", f"{tmp_path}/base/model.safetensors"]) == 0
    for kind, how in (("apart", ["--lora", "apart"]), ("merged", [])):
        words = ["--ema-sigma-rel", "0.054", "--output", f"{tmp_path}/{kind}/model.pth", *how]
        assert export.main([str(run), *words]) == 0
    files = ("base/model.safetensors", "apart/model.pth", "apart/model.lora.pth", "merged/model.pth")
    start, frozen, updates, merged = map(read, files)
    assert start.keys() == frozen.keys() == merged.keys() and all(torch.equal(start[n], frozen[n]) for n in start)
    for name, a in updates.items():
        if name.endswith("lora_A"):
            b, weight = updates[name.replace("lora_A", "lora_B")], name.replace("lora_A", "weight")
            assert b.abs().max() > 0
            torch.testing.assert_close(merged[weight], start[weight] + 8 / 4 * b @ a, rtol=1e-5, atol=1e-6)
    assert loading.find_weights(tmp_path / "merged" / "model.pth").config.model.lora.rank is None
    rebuilt = loading.find_weights(run).whole(0.054)  # as for `dfm generate --ema`
    assert all(torch.equal(rebuilt[name], x) for name, x in updates.items())
    apart = tmp_path / "apart" / "model.pth"
    assert loading.find_weights(apart).config.model.lora.rank == 4
    apart.with_name("model.lora.pth").unlink()
    refused("model.lora.pth", loading.read_lora, apart, error=FileNotFoundError)
