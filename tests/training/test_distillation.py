"""Few-step students: their targets, in any layout; exact resume; what generation is told, and what is refused."""

import shutil
from dataclasses import replace

import pytest
import torch

from dfm_nb import export_weights, train
from dfm_nb.diffusion.objective import EDM
from dfm_nb.diffusion.samplers import flow_sigmas, sample_unipc
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request
from dfm_nb.model.denoiser import PackDenoiser
from dfm_nb.packs.packs import noised, pack_draws, retexted
from tests import tiny_run
from tests.conftest import run_ranks
from tests.distributed.layouts import (
    BASE,
    LAYOUTS,
    largest_relative_difference,
    losses_and_gradients,
    make_trainer,
    randomise,
)
from tests.refusals import refused
from tests.tiny_run import losses

STUDENT = "model.student=true generation.sampler=euler generation.schedule=flow generation.guidance=1.0".split()
STUDENT.append("generation.num_steps=4")


def teach(run):
    argv = ["--mock", "--run-dir", str(run), *BASE, "train.train_iters=4", "optimizer.lr=0.02", "train.eval_interval=0"]
    assert run_ranks(1, tiny_run._train, argv) == [0]


@pytest.fixture(scope="module")
def teacher(make_once):
    return make_once("teacher", teach)


def distil(data, teacher, run, *overrides):
    words = ["ema.sigma_rels=[0.1]", f"checkpoint.pretrained={teacher}", *overrides]
    return tiny_run.train(data, run, *words, recipe="student")


@pytest.fixture(scope="module")
def student(make_once, tiny_data, tiny_checkpoint):
    return make_once("tiny-student", lambda run: distil(tiny_data, tiny_checkpoint, run))


def test_retexted_pack_is_one_of_that_text(one_rank):
    trainer, loader = make_trainer(["train.global_batch_size=1"])
    model = trainer.config.model
    text, multiple = torch.ones(3, 24, dtype=torch.bfloat16), 8
    draws = []
    for clip, start in zip(map(loader.order.store.read, range(3)), (0.3, 2.0, 20.0)):
        noise = torch.randn_like(clip.latent[0].float())
        draws.append(noised(model, clip.key, clip.latent[0].float(), noise, clip.text_emb[0], start, clip.fps))
    settings = replace(loader.order.settings, text_multiple=multiple)
    capacity = sum(len(d.x0) for d in draws)
    for extra in (0, 5):  # with and without a segment of padding
        own = retexted(pack_draws(draws, settings, capacity + extra), text, multiple)
        want = pack_draws([replace(d, text=text) for d in draws], settings, capacity + extra)
        D = [PackDenoiser(trainer.chunks, p, EDM(0.5), torch.device("cpu")) for p in (own, want)]
        x = torch.randn(own.x0.shape, dtype=torch.float64)
        assert len(own.text) % multiple == 0 and own.pool.shape[1] == len(own.text)
        torch.testing.assert_close(*(of(x, own.sigma)[:capacity] for of in D))


@pytest.mark.parametrize("asked, guidance, steps", [([], 7, 8), (["guidance=3", "steps=15"], 3, 16)])
def test_lessons_lie_on_the_teachers_guided_path(one_rank, teacher, asked, guidance, steps):
    words = [f"checkpoint.pretrained={teacher}", "train.global_batch_size=1", *(f"train.teacher_{of}" for of in asked)]
    trainer, loader = make_trainer([*STUDENT, *words])
    randomise(trainer)
    (pack,), of = loader.next_step(), (EDM(0.5), torch.device("cpu"))
    empty, free = retexted(pack, loader.order.store.empty_text), pack.loss_mask[:, None]
    cond, none = (PackDenoiser(trainer.teacher.chunks, p, *of) for p in (pack, empty))
    contrast = []

    def guided(x, sigma):
        x = torch.where(free, x, pack.x0)
        with_text, without = cond(x, sigma), none(x, sigma)
        contrast.append((with_text - without).abs().max())
        return without + guidance * (with_text - without)

    x, lessons = 80 * pack.noise.double(), trainer.teacher.lessons(pack)
    end = sample_unipc(guided, x, flow_sigmas(steps), order=2)
    assert len(lessons) == 4 and min(contrast) > 1e-4 and not any(lesson.noise.any() for lesson in lessons)
    for lesson, s, s_next in zip(lessons, *(flow_sigmas(4)[i:] for i in (0, 1))):
        rows = torch.unique(pack.row[pack.loss_mask])
        assert torch.equal(lesson.sigma[rows], s.float().expand(len(rows)))
        torch.testing.assert_close(lesson.x0[~pack.loss_mask], pack.x0[~pack.loss_mask])
        torch.testing.assert_close(*(z.float()[pack.loss_mask] for z in (lesson.x0, x)), rtol=1e-4, atol=1e-4)
        x = lesson.target + s_next / s * (lesson.x0 - lesson.target)  # the student's step
    torch.testing.assert_close(*(z.float()[pack.loss_mask] for z in (x, end)), rtol=1e-3, atol=1e-3)


def test_the_base_of_a_lora_student_is_its_teacher(one_rank, tiny_data, tiny_checkpoint, student, tmp_path):
    lora = losses(distil(tiny_data, tiny_checkpoint, tmp_path / "lora", "model.lora.rank=2"))
    whole = losses(student)
    assert lora[0] == pytest.approx(whole[0], rel=1e-4) and lora[2] != pytest.approx(whole[2], rel=1e-4)


@pytest.mark.slow
def test_layouts_equal_one_process(teacher):
    """Of two steps, as a teacher takes two or more for each."""
    settings = [*STUDENT[:-1], "generation.num_steps=2", "train.teacher_steps=4", f"checkpoint.pretrained={teacher}"]
    want = run_ranks(1, losses_and_gradients, settings, 2)[0]
    for name in ("CP2", "PP2 virtual"):
        got = run_ranks(2, losses_and_gradients, [*LAYOUTS[name][1], *settings], 2)[0]
        difference, where = largest_relative_difference(got["gradients"], want["gradients"])
        assert difference <= 1e-4, (name, where)
        for each in ("losses", "val_losses"):
            assert got[each] == pytest.approx(want[each], rel=1e-5) and want[each][0] > 0, (name, each)


def test_a_student_keeps_its_teacher_while_the_teachers_run_goes_on(tiny_data, tiny_checkpoint, student, tmp_path):
    """Its checkpoint is known by content, wherever it lies; without it the student is refused."""
    teacher, run = shutil.copytree(tiny_checkpoint, tmp_path / "teacher"), tmp_path / "run"
    stopped = ["train.exit_duration_s=1e-9", "checkpoint.save_interval=1"]
    distil(tiny_data, teacher, run, *stopped)
    off = ["train.eval_interval=1", "train.eval_iters=0"]
    tiny_run.train(tiny_data, teacher, "train.train_iters=5", *off)
    moved = teacher.rename(tmp_path / "moved")
    copied = shutil.copytree(run, tmp_path / "copied")
    distil(tiny_data, moved, run)
    assert losses(run) == losses(student)
    shutil.rmtree(moved / "checkpoints" / "iter_0000003")
    with pytest.raises(AssertionError, match="iter_0000003.*checkpoint.pretrained"):
        distil(tiny_data, moved, copied)
    assert len(losses(copied)) == 1


@pytest.mark.parametrize("recipe", ["finetune", "student"])
def test_a_lora_run_goes_on_without_its_base(recipe, tiny_data, tiny_checkpoint, tmp_path):
    """The base is in its checkpoint, whether its folder is gone or empty."""

    def tuned(run, base, *more):
        words = ["model.lora.rank=2", "ema.sigma_rels=[0.1]", f"checkpoint.pretrained={base}", *more]
        return losses(tiny_run.train(tiny_data, run, *words, recipe=recipe))

    base, run = shutil.copytree(tiny_checkpoint, tmp_path / "base"), tmp_path / "run"
    whole = tuned(tmp_path / "whole", base)
    tuned(run, base, "train.exit_duration_s=1e-9")
    shutil.rmtree(base)
    if recipe == "student":
        base.mkdir()
    assert tuned(run, base) == whole and len(whole) == 3
    with pytest.raises(AssertionError, match=f"ValueError.*{tmp_path}/whole"):  # without its LoRA it is no teacher
        distil(tiny_data, tmp_path / "whole", tmp_path / "of-lora", "model.lora.rank=2")


def test_an_exported_student_is_asked_as_it_recommends(one_rank, student, tmp_path):
    pipe = Pipeline.from_checkpoint(export_weights(student, tmp_path / "student.safetensors"))
    request = Request("x").completed(pipe.config)
    assert (request.sampler, request.num_steps, request.guidance) == ("euler", 4, 1.0)
    calls = []
    pipe.chunks[0].register_forward_hook(lambda *_: calls.append(1))
    assert pipe(["x"], height=32, width=32)[0].frames.shape == (1, 32, 32, 3) and len(calls) == 4
    others = {"guidance": 2.0, "sampler": "heun", "negative_prompt": "y", "guidance_interval": (0.1, 1.0)}
    for name, value in others.items():
        refused(f"--{name.replace('_', '-')}", pipe, ["x"], **{name: value})


def test_a_student_needs_a_teacher_that_is_none_and_its_data(tiny_data, student, tiny_checkpoint, tmp_path):
    words = ["--dataset-path", str(tiny_data), "--run-dir", str(tmp_path), *tiny_run.SIZE]
    for recipe in ("student", "finetune"):
        refused(
            str(student), train.TrainOptions.parse([*words, "--recipe", recipe, f"checkpoint.pretrained={student}"]).run
        )
    refused("checkpoint.pretrained", train.TrainOptions.parse([*words, "--recipe", "student"]).run)
