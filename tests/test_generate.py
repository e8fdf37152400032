"""Generation: geometry, reproducibility over batches, processes and layouts, files, errors; on a tiny trained-for-nothing checkpoint."""

import json
import os
import subprocess

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dfm_nb.argv import guard, torchrun_argv
from dfm_nb.generate import Request, output_path, parse, requests_of
from dfm_nb.video import read_video


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three iterations on a small synthetic set: weights mean nothing, everything else is real."""
    from dfm_nb.prepare import main as prepare

    folder = tmp_path_factory.mktemp("gen")
    data, run = folder / "data", folder / "run"
    argv = [
        "--source",
        "synthetic",
        "--num-images",
        "30",
        "--num-clips",
        "4",
        "--short-side",
        "32",
        "--output-dir",
        str(data),
    ]
    assert prepare(argv) == 0
    argv = [
        "--recipe", "demo", "--dataset-path", str(data), "--run-dir", str(run), "model.num_layers=2", "model.hidden_size=48",
        "model.num_attention_heads=4", "train.train_iters=3", "train.global_batch_size=1", "dataset.task_encoder_seq_length=160",
        "scheduler.lr_warmup_iters=1", "train.eval_interval=0",
    ]  # fmt: skip
    done = subprocess.run(
        torchrun_argv("dfm_nb.train", argv, 1),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.fixture(scope="module")
def pipe(trained):
    from dfm_nb import parallel
    from dfm_nb.generate import Pipeline

    parallel.init()
    yield Pipeline.from_checkpoint(trained)
    parallel.shutdown()


PROMPTS = [f"a {c} butterfly over a meadow" for c in ("red", "blue", "green", "white")]
FAST = {"height": 32, "width": 48, "num_steps": 3, "guidance": 2.0}


@pytest.mark.slow
def test_pipeline_returns_frames_that_play(pipe):
    clips = pipe(PROMPTS[:2], num_video_frames=5, **FAST)
    assert clips.array().shape == (2, 5, 32, 48, 3) and clips.array().dtype == np.uint8
    page = clips._repr_html_()
    assert page.count("<video") == 2 and "data:video/mp4;base64," in page and "a red butterfly" in page


@pytest.mark.slow
def test_latents_do_not_depend_on_the_batch(pipe):
    requests = [Request(p, index=i, **FAST) for i, p in enumerate(PROMPTS)]
    together = pipe.sample_latents(requests)
    for i, r in enumerate(requests):
        torch.testing.assert_close(pipe.sample_latents([r])[0], together[i], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_same_request_gives_the_same_latent_and_another_seed_another(pipe):
    r = Request(PROMPTS[0], **FAST)
    first = pipe.sample_latents([r])
    assert torch.equal(first, pipe.sample_latents([r]))
    assert not torch.allclose(first, pipe.sample_latents([Request(PROMPTS[0], seed=2, **FAST)]))
    assert not torch.allclose(first, pipe.sample_latents([Request(PROMPTS[0], index=1, **FAST)]))


@pytest.mark.slow
def test_guidance_follows_its_definition(pipe):
    """guidance 1 is the conditional model; the guided estimate lies on the line through both."""
    from dfm_nb.generate import _Guided

    x, sigma = torch.randn(1, 16, 1, 4, 6, dtype=torch.float64), torch.tensor(1.5)
    D = {g: _Guided(pipe, [Request(PROMPTS[0], **{**FAST, "guidance": g})], None)(x, sigma) for g in (0.0, 1.0, 3.0)}
    torch.testing.assert_close(D[3.0], D[0.0] + 3 * (D[1.0] - D[0.0]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_negative_prompt_acts_and_interval_switches_guidance_off(pipe):
    plain = pipe.sample_latents([Request(PROMPTS[0], **FAST)])
    negative = pipe.sample_latents([Request(PROMPTS[0], negative_prompt="night", **FAST)])
    assert not torch.allclose(plain, negative)
    off = pipe.sample_latents([Request(PROMPTS[0], guidance_interval=(1e-6, 2e-6), **FAST)])
    torch.testing.assert_close(off, pipe.sample_latents([Request(PROMPTS[0], **{**FAST, "guidance": 1.0})]))


@pytest.mark.slow
def test_sizes_beyond_training_are_drawn(pipe):
    assert pipe(PROMPTS[:1], height=160, width=96, num_steps=1, num_video_frames=9).array().shape == (1, 9, 160, 96, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [[], ["--cp-size", "2"], ["--tp-size", "2"], ["--pp-size", "2"]], ids=["DP2", "CP2", "TP2", "PP2"]
)
def test_two_processes_give_the_latents_of_one(pipe, trained, tmp_path, flags):
    argv = [
        "--checkpoint-path", str(trained), "--height", "32", "--width", "48", "--num-steps", "3", "--guidance", "2", "--num-video-frames", "5",
        "--video-save-path", str(tmp_path / "out.mp4"), "--save-latents", *flags,
    ]  # fmt: skip
    for p in PROMPTS:
        argv += ["--prompt", p]
    done = subprocess.run(
        torchrun_argv("dfm_nb.generate", argv, 2),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(p.name for p in tmp_path.glob("*.mp4"))
    assert [n.split("_")[0] for n in names] == ["idx=0", "idx=1", "idx=2", "idx=3"]
    want = pipe.sample_latents([Request(p, index=i, num_video_frames=5, **FAST) for i, p in enumerate(PROMPTS)])
    for i, name in enumerate(names):
        frames, fps = read_video(tmp_path / name)
        assert frames.shape == (5, 32, 48, 3) and fps == 12
        latent = load_file(tmp_path / f"{name}.safetensors")["latent"]
        torch.testing.assert_close(latent, want[i].float(), rtol=1e-4, atol=1e-4)
        record = json.loads((tmp_path / f"{name}.json").read_text())
        assert record["prompt"] == PROMPTS[i] and record["checkpoint"]["sha256"]


@pytest.mark.slow
def test_a_model_cannot_guide_itself(pipe, trained):
    """Autoguidance moves away from a worse model; with the model itself as guide nothing is left to move along."""
    from dfm_nb.generate import Pipeline

    guided = Pipeline.from_checkpoint(trained, guide=trained)
    request = Request(PROMPTS[0], **{**FAST, "guidance": 4.0})
    plain = pipe.sample_latents([Request(PROMPTS[0], **{**FAST, "guidance": 1.0})])
    torch.testing.assert_close(guided.sample_latents([request]), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_little_strength_stays_near_the_given_video(pipe, tmp_path):
    from dfm_nb.video import write_mp4

    y, x = np.mgrid[0:32, 0:48]
    frame = np.stack([y * 8, x * 5, np.full_like(x, 90)], -1).astype(np.uint8)
    write_mp4(tmp_path / "in.mp4", np.repeat(frame[None], 5, 0), 12, crf=1)
    settings = {
        **FAST,
        "num_steps": 40,
        "sampler": "euler",
        "guidance": 1.0,
        "num_video_frames": 5,
        "init_video": str(tmp_path / "in.mp4"),
    }
    start = pipe.decode(pipe._encode_pixels(np.repeat(frame[None], 5, 0)))  # the tokenizer's loss is not the sampler's
    distance = {}
    for strength in (0.05, 1.0):
        frames = pipe(PROMPTS[:1], strength=strength, **settings).array()[0]
        distance[strength] = np.abs(frames.astype(int) - start).mean()
    assert distance[0.05] < 5 and distance[1.0] > 30, distance


@pytest.mark.slow
def test_first_frame_needs_a_model_trained_for_it(pipe, tmp_path):
    from dfm_nb.video import write_png

    write_png(tmp_path / "a.png", np.zeros((32, 48, 3), np.uint8))
    with pytest.raises(ValueError, match="dataset.condition_frames_prob"):
        pipe.sample_latents([Request(PROMPTS[0], num_video_frames=5, init_image=str(tmp_path / "a.png"), **FAST)])
    pipe.config.dataset.condition_frames_prob = 0.5  # the sampler's part, on a model that was not trained for it
    try:
        latent = pipe.sample_latents(
            [Request(PROMPTS[0], num_video_frames=5, init_image=str(tmp_path / "a.png"), **FAST)]
        )
    finally:
        pipe.config.dataset.condition_frames_prob = 0.0
    given = pipe._encode_pixels(np.zeros((1, 32, 48, 3), np.uint8))
    torch.testing.assert_close(latent[0][:, :1], given)


@pytest.mark.slow
def test_finished_files_are_kept_unless_asked(trained, tmp_path, capsys):
    from dfm_nb.generate import main

    out = tmp_path / "a.mp4"
    out.write_bytes(b"mine")
    argv = [
        "--checkpoint-path",
        str(trained),
        "--prompt",
        "x",
        "--num-video-frames",
        "5",
        "--video-save-path",
        str(out),
    ]
    assert guard(main, argv) == 2
    assert "--overwrite" in capsys.readouterr().err and out.read_bytes() == b"mine"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"height": 100}, "--height must be divisible by 16; got 100; use 96 or 112"),
        ({"num_video_frames": 10}, "got 10; use 9 or 13"),
        ({"sampler": "magic"}, "a sampler must be one of"),
        ({"fps": 0}, "--fps must be positive"),
    ],
)
def test_bad_settings_are_refused_with_the_fix(settings, message):
    with pytest.raises(ValueError) as error:
        Request("x", **settings).check()
    assert message in str(error.value)


def test_prompt_without_checkpoint_is_one_sentence(capsys, tmp_path):
    from dfm_nb.generate import main

    assert guard(main, ["--checkpoint-path", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert "there is no checkpoint at" in capsys.readouterr().err


def test_prompts_file_lines_may_set_fields(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a", "seed": 5}\n\n{"prompt": "b", "num_video_frames": 9}\n')
    r = requests_of(parse(["--checkpoint-path", "x", "--prompts-file", str(file), "--guidance", "2"]))
    assert [(q.prompt, q.seed, q.num_video_frames, q.guidance, q.index) for q in r] == [
        ("a", 5, 1, 2.0, 0),
        ("b", 1, 9, 2.0, 1),
    ]
    file.write_text('{"prompt": "a", "sede": 5}\n')
    with pytest.raises(ValueError, match="line 1: unknown sede"):
        requests_of(parse(["--checkpoint-path", "x", "--prompts-file", str(file)]))


def test_output_names(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    base = tmp_path / "clip.mp4"
    assert output_path(base, Request("x", num_video_frames=9), many=False) == base
    assert output_path(base, Request("x", index=3, num_video_frames=9), many=True).name == "idx=3_rank=0_clip.mp4"
    assert output_path(base, Request("x"), many=False).name == "clip.png"
