"""Given frames and video-to-video; on a model trained with given first and last frames."""

import numpy as np
import pytest
import torch
from PIL import Image

from dfm_nb.base.video import read_image, resize, write_mp4, write_png
from dfm_nb.checkpoints import folders
from dfm_nb.diffusion.samplers import karras_sigmas, sample_euler
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request
from tests import tiny_run
from tests.frames import animate, black
from tests.refusals import refused

pytestmark = pytest.mark.slow

FAST = {"height": 32, "width": 48, "num_steps": 4, "guidance": 3.0, "num_video_frames": 9}


@pytest.fixture(scope="module")
def conditioned_checkpoint(tiny_data, tmp_path_factory):
    run = tmp_path_factory.mktemp("conditioned") / "run"
    frames = "dataset.condition_frames_prob=0.5", "dataset.condition_last_prob=0.5"
    return tiny_run.train(tiny_data, run, *frames, "rng.seed=3")


@pytest.fixture(scope="module")
def conditioned(conditioned_checkpoint, tiny_pipe):
    pipe = Pipeline.from_checkpoint(conditioned_checkpoint)
    pipe.config = pipe.config.with_samples(pipe.config.samples.model_copy(update={"given": True}))
    return pipe


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """A PNG of smooth colours, 64 x 96 px."""
    y, x = np.mgrid[0:64, 0:96]
    path = tmp_path_factory.mktemp("picture") / "first.png"
    write_png(path, np.stack([y * 4, x * 2, np.full_like(x, 90)], -1).astype(np.uint8))
    return str(path)


@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2m_sde"])
def test_given_images_stay_the_first_and_the_last_frame(conditioned, picture, sampler):
    image = conditioned.encode_pixels(resize(read_image(picture), 32, 48))
    still = conditioned.encode_pixels(resize(read_image(picture), 32, 48).repeat(5, 0))
    for ends in ({"init_image": picture}, {"last_image": picture}, {"init_image": picture, "last_image": picture}):
        one, other = conditioned.sample_latents([Request(p, sampler=sampler, **ends, **FAST) for p in "ab"])
        assert torch.equal(one[:, 0], image[:, 0]) == ("init_image" in ends)
        assert torch.equal(one[:, -1], still[:, -1]) == ("last_image" in ends)
        assert not torch.allclose(one[:, 1], other[:, 1])


def test_other_frames_see_the_given_one_and_no_neighbour_does(conditioned, tmp_path):
    """Samples with different pictures are one batch, and each is as it is alone."""
    for name, level in (("white", 255), ("black", 0)):
        write_png(tmp_path / f"{name}.png", np.full((32, 48, 3), level, np.uint8))
    starts = [str(tmp_path / f"{name}.png") for name in ("white", "black")]
    settings = {**FAST, "sampler": "heun", "schedule": "karras"}
    for name in ("init_image", "last_image", "given"):
        requests = [Request("a", **{name: [s] if name == "given" else s}, **settings) for s in starts]
        batches = []
        done = dict(conditioned.run(requests, callback=lambda *step, sizes=batches: sizes.append(len(step[2]))))
        assert set(batches) == {2}
        alone = conditioned.sample_latents([requests[1].completed(conditioned.config)])
        torch.testing.assert_close(done[1].latent, alone[0].float(), rtol=1e-4, atol=1e-4)
        assert (done[0].latent - done[1].latent)[:, 1].abs().mean() > 1e-3


def test_a_clip_has_more_than_its_given_frames(conditioned, picture):
    refused("--num-video-frames 5", conditioned, "a", init_image=picture, last_image=picture, num_video_frames=5)


def test_a_given_picture_counts_with_its_own_tokens(conditioned, picture, tmp_path):
    """2 x 3 patches of the target, and of 32 x 48 px or of its quarter."""
    write_png(tmp_path / "square.png", black(32, 32))
    size = {"height": 32, "width": 48, "num_video_frames": 1}
    alone, wide, square = (
        Request("a", given=given, **size) for given in ((), [picture], [str(tmp_path / "square.png")])
    )
    assert wide.grids == [(1, 4, 6), (1, 4, 6)] and square.grids == [(1, 4, 6), (1, 4, 4)]
    assert (
        conditioned.needed_bytes([alone])
        < conditioned.needed_bytes([square])
        < conditioned.needed_bytes([square, wide])
    )


def test_given_frame_has_its_own_noise_level_at_every_step(conditioned, picture):
    """The network is told CLEAN_SIGMA for the given frame and the sampler's sigma for the others."""
    request = Request("a", init_image=picture, **FAST)
    guided = conditioned.denoiser([request])
    seen = []
    denoise = guided.both.denoise
    run = denoise._run

    def spy(scaled, c_noise, shape):
        seen.append((c_noise.unique().tolist(), denoise.part.row.clone()))
        return run(scaled, c_noise, shape)

    denoise._run = spy
    x = torch.randn(1, 16, 3, 4, 6, dtype=torch.float64)
    guided(x, torch.tensor(5.0))
    levels, rows = seen[0]
    assert len(levels) == 2, "two levels: of the given frame and of the others"
    per_frame = 2 * 3
    assert len(rows[:per_frame].unique()) == 1 and rows[0] != rows[per_frame]


def test_init_video_starts_from_the_noised_clip(conditioned, tmp_path):
    """The start is the clip's latent plus noise at the level where `strength` cuts the schedule, bit for bit."""
    frames = np.random.default_rng(0).integers(0, 255, (9, 32, 48, 3)).astype(np.uint8)
    write_mp4(tmp_path / "in.mp4", frames, 12, crf=1)
    settings = {**FAST, "num_steps": 6, "strength": 0.5, "sampler": "euler", "schedule": "karras"}
    request = Request("a", init_video=str(tmp_path / "in.mp4"), **settings)
    sigmas = karras_sigmas(6)[3:]
    assert torch.equal(request.sigmas(), sigmas)
    from dfm_nb.base.seeds import generator_for

    start, _ = conditioned._start(request.replace(tokenizer_window=17))  # which is for decoding
    noise = torch.randn(start.shape, generator=generator_for("sample", 1, 0), dtype=torch.float64)
    want = sample_euler(conditioned.denoiser([request]), (start + sigmas[0] * noise)[None], sigmas)
    assert torch.equal(conditioned.sample_latents([request]), want)


@pytest.mark.parametrize("sampler", ["unipc_2", "heun_stochastic"])
def test_a_picture_is_a_start_and_what_its_mask_has_black_is_kept(conditioned, picture, sampler, tmp_path):
    """A picture stands still in a clip. Of 32 x 48 px, latent columns 0 to 2 of 6 are kept."""
    mask = black(64, 96)
    mask[:, 50:] = 255  # resized to half, so from pixel 25 of 48 on
    write_png(tmp_path / "mask.png", mask)
    settings = {**FAST, "init_video": picture, "strength": 1.0, "sampler": sampler}
    request = Request("a", mask=str(tmp_path / "mask.png"), **settings)
    start, free = conditioned._start(request)
    assert start.shape == (16, 3, 4, 6) and free.any(0).tolist() == [False] * 3 + [True] * 3
    (latent,), (other,) = (conditioned.sample_latents([r]) for r in (request, Request("a", **settings)))
    assert torch.equal(latent[..., :3], start[..., :3])
    assert not torch.allclose(latent[..., 3:], start[..., 3:], atol=0.1) and not torch.allclose(latent, other)
    write_png(tmp_path / "mask.png", mask[1:])
    refused("--mask.*96x64 px; got 96x63", conditioned.sample_latents, [request])
    animate(tmp_path / "mask.png", [np.roll(mask, step, 1) for step in (0, 8)])
    refused("--mask.*2 frames", conditioned.sample_latents, [request])
    for level in (1, 255):  # of 1 for what is to change, and white paint on a layer without a ground
        write_png(tmp_path / "mask.png", np.full_like(mask, level))
        refused("--mask", conditioned.sample_latents, [request])


def test_transparent_pixels_show_the_ground_that_training_had_from_any_folder(
    conditioned_checkpoint, tiny_pipe, tmp_path, monkeypatch
):
    """The weights have a relative path, and the working directory changes after they are found."""
    black = {**folders.read_manifest(tiny_pipe.folder), "source": {"name": "folder", "background": [0, 0, 0]}}
    monkeypatch.setattr(folders, "read_manifest", lambda folder: black)
    monkeypatch.chdir(conditioned_checkpoint.parent)
    pipe = Pipeline.from_checkpoint(conditioned_checkpoint.name)
    pipe.config = pipe.config.with_samples(pipe.config.samples.model_copy(update={"given": True}))
    monkeypatch.chdir(tmp_path)
    size = {"height": 32, "width": 48, "num_video_frames": 9}
    kinds = {"init_image": "clear.png", "last_image": "clear.png", "init_video": "clear.png", "given": ["clear.png"]}
    for name, value in kinds.items():
        request, starts = Request("a", **{name: value}, **size), []
        for colour in ((255, 0, 0, 0), (0, 0, 0, 255)):  # transparent, black
            Image.new("RGBA", (48, 32), colour).save("clear.png")
            starts.append([pipe._start(request)[0], *pipe._given(request)])
        assert all(map(torch.equal, *starts))


def test_a_clip_that_starts_at_another_rate_or_is_short_says_so(conditioned, tmp_path, caplog):
    settings = {k: v for k, v in FAST.items() if k != "num_video_frames"}
    for count, number, said in ((9, 5, "--fps 24"), (9, 1, ""), (2, 5, "2 frames")):
        write_mp4(tmp_path / "in.mp4", black(count, 32, 48), 24)
        caplog.clear()
        conditioned._start(Request("a", init_video=str(tmp_path / "in.mp4"), num_video_frames=number, **settings))
        assert (said in caplog.text) and bool(said) == bool(caplog.text)


def test_short_or_missing_init_video_is_refused(conditioned, tmp_path):
    write_mp4(tmp_path / "in.mp4", black(5, 32, 48), 12)
    refused(
        "--num-video-frames", conditioned.sample_latents, [Request("a", init_video=str(tmp_path / "in.mp4"), **FAST)]
    )
    for flag in ("init_video", "init_image"):
        refused(
            "nowhere.mp4", conditioned, ["a"], **{flag: str(tmp_path / "nowhere.mp4")}, **FAST, error=FileNotFoundError
        )


def test_a_given_picture_acts_and_its_guidance_is_the_published_sum(conditioned, picture):
    """Brooks et al. 2023, Eq. 3, from three estimates that are each made alone; the size follows the picture's."""
    size = {"height": 32, "width": 48}
    request = Request("a", given=[picture], given_guidance=1.7, guidance=3.0, num_video_frames=1)
    done = request.completed(conditioned.config)
    assert (done.height, done.width) == (32, 48)
    x = torch.randn(1, 16, 1, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    level = torch.tensor(1.0, dtype=torch.float64)
    alone = [
        conditioned.denoiser([Request(prompt, given=given, guidance=1, num_video_frames=1, fps=done.fps, **size)])(
            x, level
        )
        for prompt, given in (("a", [picture]), ("", [picture]), ("", []))
    ]
    words, pictures, neither = alone
    assert (pictures - neither).abs().max() > 1e-3
    want = neither + 1.7 * (pictures - neither) + 3.0 * (words - pictures)
    torch.testing.assert_close(conditioned.denoiser([done])(x, level), want, rtol=1e-4, atol=1e-4)


def test_given_needs_a_model_trained_with_such(tiny_pipe, picture):
    refused("--given", list, tiny_pipe.run([Request("a", given=[picture])]))
