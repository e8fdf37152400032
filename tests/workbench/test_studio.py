"""The Studio by its callbacks: with a pipeline that has a closed form, and with a trained one.

In closed form the estimate's middle frame after step k of n is a constant, `level(request) * k / n`.
"""

from __future__ import annotations

import base64
import re
import shlex
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dfm_nb.base import video
from dfm_nb.config.samples import Captions, Kind, TrainingSamples, simhash
from dfm_nb.config.schema import Config, DatasetConfig, GenerationConfig
from dfm_nb.diffusion import samplers
from dfm_nb.display import media_in
from dfm_nb.generate import GenerateOptions
from dfm_nb.generation.clip_files import Generated
from dfm_nb.generation.request import Request
from tests.frames import black
from tests.json_files import read_json
from tests.processes import wait_until
from tests.refusals import refused
from workbench import studio as module
from workbench.studio import Studio, strip_steps


def level(request: Request) -> int:
    """The brightness of a request's clip: its guidance tells it."""
    return round(20 * request.guidance)


class Estimate(NamedTuple):
    pipe: ClosedForm
    request: Request
    share: float

    @property
    def middle(self) -> np.ndarray:
        frames = self.pipe.decode(self.request, self.share)
        return frames[len(frames) // 2]


class ClosedForm:
    """Notes requests as they begin and end, and which estimates are decoded. wait_s : of a step."""

    sigma_data, ema, guide, chunks, made_by = 0.5, "auto", None, (), {}
    device = torch.device("cpu")
    config = Config(generation=GenerationConfig(num_steps=18, guidance=2.0, sampler="heun"))
    source = SimpleNamespace(file=None, folder=Path("runs/closed form"))

    def __init__(self, wait_s: float = 0.0):
        self.wait_s, self.begun, self.ended, self.decoded = wait_s, [], [], 0

    def flops(self, request: Request) -> float:
        return 1e6 * request.height * request.width

    def decode(self, request: Request, share: float) -> np.ndarray:
        self.decoded += 1
        values = black(request.num_video_frames, request.height, request.width)
        values[request.num_video_frames // 2] = round(share * level(request))
        return values

    def run(self, requests, callback=None):
        for i, request in enumerate(requests):
            self.begun.append(request)
            for k in range(1, request.num_steps + 1):
                time.sleep(self.wait_s)
                callback(k, request.num_steps, [Estimate(self, request, k / request.num_steps)])
            self.ended.append(request)
            yield i, Generated(self.decode(request, 1.0), request, torch.zeros(16, 1, 4, 4))


def small(pipe=None, **settings) -> Studio:
    return Studio(pipe or ClosedForm(), "a moth", **{"folder": None, "height": 32, "width": 32, **settings})


def settled(studio: Studio) -> None:
    wait_until(lambda: not studio._running, "the thread to end")


def type_in(studio: Studio, name: str, value: str) -> None:
    studio.controls[name].value = value
    settled(studio)


def shown_level(studio: Studio) -> float:
    """Mean of the picture in the page."""
    data = re.search(r'<img src="data:image/png;base64,([^"]+)"', studio._image.value)
    return float(video.read_image(base64.b64decode(data[1])).mean()) if data else -1.0


# ---- drawing -----------------------------------------------------------------------------------------------------


def test_stills_and_clips_are_told_what_the_checkpoint_recommends_for_each():
    stills = Kind(height=32, width=32, num_video_frames=1, fps=1.0)
    clips = Kind(height=32, width=48, num_video_frames=9, fps=25.0)
    pipe = ClosedForm()
    pipe.config = Config().with_samples(TrainingSamples(kinds=[stills, clips]))
    studio = Studio(pipe, "a moth", folder=None)
    assert studio.request().fps == 1
    studio.controls["num_video_frames"].value = "9"
    assert (studio.request().fps, studio.request().width) == (25, 32), "the size that is shown stays"
    settled(studio)
    studio = Studio(pipe, "a moth", folder=None)
    clip = studio.draw(num_video_frames=9)
    assert (clip.request.fps, clip.request.width) == (25, 48)
    assert all("fps" not in code and "width" not in code and "9" in code for code in studio.code())
    assert studio.draw(num_video_frames=1, fps=7.0).request.fps == 7 and "fps" in studio.code()[0]


def test_a_size_that_was_not_trained_is_drawn_with_a_word():
    pipe = ClosedForm()
    kind = Kind(height=32, width=48, num_video_frames=1, fps=1.0, sizes=["48x32", "32x32"])
    pipe.config = Config().with_samples(TrainingSamples(kinds=[kind]))
    studio = Studio(pipe, "a moth", folder=None)
    assert studio.draw().request.width == 48 and "trained" not in studio.message
    type_in(studio, "width", "64")
    assert studio.draw().request.width == 64 and "64x32 px was not trained" in studio.message


def test_the_size_follows_a_new_prompt_until_the_user_sets_one():
    pipe = ClosedForm()
    form = {"height": 32, "width": 32, "num_video_frames": 1, "fps": 1.0}
    known = {"a red moth at night": 32, "a wide harbour": 64}
    captions = [Captions(**form | {"width": w}, given=False, simhash=simhash([text])) for text, w in known.items()]
    samples = TrainingSamples(kinds=[Kind(**form, sizes=["32x32", "64x32"])], captions=captions)
    pipe.config = Config().with_samples(samples)
    studio = Studio(pipe, "a red moth at night", folder=None)
    for prompt, width in (("a wide harbour", 64), ("chess", 32), ("A wide harbour.", 64)):
        studio.controls["prompt"].value = prompt
        assert (studio.request().width, studio.request().height) == (width, 32)
        settled(studio)
    assert all("width" not in code for code in studio.code())
    type_in(studio, "width", "48")
    type_in(studio, "prompt", "a red moth at night")
    assert studio.request().width == 48 and all("width" in code for code in studio.code())
    assert studio.draw("a wide harbour", width=32).request.width == 32 and "width=32" in studio.code()[0]


def test_draw_returns_the_clip_and_the_controls_follow():
    pipe = ClosedForm()
    studio = small(pipe)
    clip = studio.draw("a red moth", num_inference_steps=20, seed=3)
    assert pipe.decoded == 8 + 1, "only steps that are shown"
    wanted = {"height": 32, "width": 32, "num_steps": 20, "guidance": 2.0, "sampler": "heun", "seed": 3}
    assert clip.request == Request("a red moth", **wanted)
    assert (studio.controls["prompt"].value, studio.controls["seed"].value) == ("a red moth", "3")
    assert studio.request() == clip.request and studio.history == [clip]
    estimates = studio._ways[clip.request]
    assert [step for step, _, _ in estimates] == [1, 4, 6, 9, 12, 15, 17, 20]
    sigmas = clip.request.sigmas(0.5)
    assert [sigma for _, sigma, _ in estimates] == [float(sigmas[s]) for s, _, _ in estimates]
    levels = [int(frame.mean()) for _, _, frame in estimates]
    assert levels == sorted(levels) and levels[-1] == level(clip.request)
    assert "a red moth" in studio.kept_html()
    assert [strip_steps(n)[-1] for n in (1, 7, 35)] == [1, 7, 35] and strip_steps(2) == [1, 2]


def test_a_moving_slider_draws_rough_pictures_and_one_clip_when_it_rests(monkeypatch):
    monkeypatch.setattr(module, "REST_S", 0.4)
    pipe = ClosedForm()
    studio = small(pipe)
    for guidance in (3.0, 3.5, 4.0):
        studio.controls["guidance"].value = guidance
        wait_until(lambda g=guidance: shown_level(studio) == 20 * g, "the rough picture")
        assert not studio.history
    settled(studio)
    assert [c.request.guidance for c in studio.history] == [4.0]
    assert [r.guidance for r in pipe.ended] == [3.0, 3.5, 4.0, 4.0]
    for rough in pipe.ended[:3]:
        assert samplers.evaluations(rough.sampler, rough.num_steps) <= 5
    assert pipe.ended[3] == studio.request()


def test_a_newer_request_ends_an_older_one_between_steps():
    pipe = ClosedForm(wait_s=0.02)
    studio = small(pipe, num_steps=100)
    studio.controls["prompt"].value = "a blue moth"  # Enter; the kernel is free at once
    wait_until(lambda: len(pipe.begun) == 2, "the clip begins")
    studio.controls["guidance"].value = 5.0
    wait_until(lambda: len(pipe.begun) == 3, "the newer begins")
    assert pipe.ended == [pipe.begun[0]] and pipe.begun[2].guidance == 5.0
    next(b for b in buttons(studio.widget) if b.description == "Stop").click()
    settled(studio)
    assert studio.message == "stopped" and studio.history == []


def test_what_takes_long_is_drawn_only_by_the_button():
    studio = small(pipe := ClosedForm())
    type_in(studio, "width", "100000")
    assert pipe.begun == [] and "5 min" in studio.message
    next(b for b in buttons(studio.widget) if b.description == "Draw").click()
    wait_until(lambda: pipe.begun, "the drawing")
    type_in(studio, "width", "32")
    assert [c.request.width for c in studio.history] == [32] and studio.message.startswith("done")


def buttons(box) -> list:
    """All buttons of a widget."""
    return [b for child in getattr(box, "children", ()) for b in buttons(child)] + [box] * hasattr(box, "click")


def test_an_error_of_the_pipeline_is_shown():
    pipe = ClosedForm()
    pipe.run = lambda requests, callback: (_ for _ in ()).throw(ValueError("too little memory"))
    studio = small(pipe)
    studio.redraw()
    settled(studio)
    assert "too little memory" in studio.message
    refused("", studio.draw)


# ---- controls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "typed", "said"), [("seed", "1.5", "1.5"), ("height", "65", "65"), ("num_video_frames", "10", "10")]
)
def test_a_bad_value_is_a_sentence_beside_its_control_and_draws_nothing(name, typed, said):
    pipe = ClosedForm()
    studio = small(pipe)
    studio.controls[name].value = typed
    assert list(studio.faults) == [name] and said in studio.faults[name]
    assert said in studio._fault_places[name].value and studio.controls[name].value == typed
    settled(studio)
    assert pipe.begun == []
    refused(said, studio.draw)
    type_in(studio, name, "32" if name == "height" else "5")
    assert studio.faults == {} and studio._fault_places[name].value == "" and len(studio.history) == 1


# ---- history -----------------------------------------------------------------------------------------------------


def test_a_thumbnail_goes_back_to_its_settings():
    pipe = ClosedForm()
    studio = small(pipe)
    first = studio.draw("one", seed=7, fps=8.0)
    studio.draw("two", guidance=4.0, num_video_frames=5)
    assert "<video" in studio._image.value
    studio._past.children[0].children[0].click()
    assert studio.clip is first and studio.request() == first.request and shown_level(studio) == level(first.request)
    begun = len(pipe.begun)
    studio.redraw()
    settled(studio)
    assert len(pipe.begun) == begun and len(studio.history) == 2  # the same settings are the same clip


def test_saved_clips_have_their_settings_and_names_of_their_own(tmp_path):
    studio = small(folder=tmp_path)
    for settings in ({}, {"guidance": 3.0}, {"num_video_frames": 5}):
        studio.draw("A moth, at ../night!", seed=5, **settings)
    names = [f"a-moth-at-night-seed5{end}" for end in (".png", "-2.png", "-3.mp4")]
    assert {p.name for p in media_in(tmp_path)} == set(names)
    assert read_json(tmp_path / f"{names[0]}.json")["seed"] == 5


@pytest.mark.parametrize("frames", [1, 5])
def test_a_file_restores_its_settings_and_a_foreign_one_is_a_start(tmp_path, frames):
    studio, other = small(), small(folder=tmp_path / "mine")
    studio.draw("A moth", seed=5, guidance=3.0, num_video_frames=frames)
    path = studio.clip.save(tmp_path / "moth")
    other.open(path)
    assert other.request() == studio.clip.request
    video.write_png(tmp_path / "foreign.png", black(32, 32))
    refused("", other.open, tmp_path / "foreign.png")
    other._on_upload([{"name": "../foreign.png", "content": memoryview((tmp_path / "foreign.png").read_bytes())}])
    start = Path(other.request().init_video)
    assert start.name == "foreign.png" and start.parents[1] == tmp_path / "mine/opened"
    other.stop()
    settled(other)


def test_a_model_of_given_pictures_has_fields_for_them_and_opens_into_them(tmp_path):
    assert not {"given", "init_image", "last_image"} & small().controls.keys()
    pipe = ClosedForm()
    data = DatasetConfig(condition_frames_prob=0.5, condition_last_prob=0.5)
    pipe.config = Config(generation=GenerationConfig(num_steps=2), dataset=data)
    pipe.config = pipe.config.with_samples(TrainingSamples(given=True))
    picture = tmp_path / "my first.png"
    video.write_png(picture, black(32, 48))
    studio = small(pipe, folder=tmp_path, num_video_frames=9, init_image=str(picture))
    studio.controls["last_image"].value = str(picture)
    studio._on_upload([{"name": "my cat.png", "content": memoryview(picture.read_bytes())}])
    request = studio.request()
    assert (request.init_image, request.last_image) == (str(picture), str(picture))
    assert [Path(path).name for path in request.given] == ["my cat.png"]
    studio.controls["last_image"].value = str(tmp_path / "none.png")
    assert studio.request() is None and list(studio.faults) == ["last_image"]
    studio.stop()
    settled(studio)
    studio._fill(request)
    assert studio.request() == request


def test_the_history_outlives_the_kernel(tmp_path):
    studio = small(folder=tmp_path)
    drawn = [studio.draw(seed=seed, num_video_frames=frames) for seed, frames in ((1, 1), (2, 5))]
    video.write_png(tmp_path / "foreign.png", black(32, 32))
    again = small(folder=tmp_path)
    assert [c.request for c in again.history] == [c.request for c in drawn]
    again.go_back(again.history[0])
    assert again.request() == drawn[0].request and shown_level(again) == level(drawn[0].request)


# ---- with a trained pipeline -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_newer_request_ends_an_older_one_within_an_evaluation(tiny_pipe):
    studio, looks = Studio(tiny_pipe, "a red moth", folder=None, height=32, width=48, num_steps=3), [True] * 2
    with pytest.raises(IndexError):
        studio._generate(studio.request(), looks.pop, rough=False)
    assert studio._generate(studio.request(), lambda: True, rough=False).frames.shape == (1, 32, 48, 3)


@pytest.mark.slow
def test_the_code_makes_the_same_clip_again_also_of_one_of_a_list(tiny_pipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clips = tiny_pipe(["a moth", "a 'red' moth"], height=32, width=48, num_steps=3)
    studio = Studio(tiny_pipe, folder=None)
    studio.open(clips[1].save("second.png"))
    settings = {"guidance": 3.0, "guidance_interval": (0.1, 10.0), "negative_prompt": "-night"}
    clip = studio.draw(**settings)
    python, shell = studio.code()
    names: dict = {}
    exec(python, names)
    torch.testing.assert_close(names["clip"].latent, clip.latent, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "clip.png").is_file()
    written, command = shell.splitlines()
    subprocess.run(written, shell=True, check=True)
    (request,) = GenerateOptions.parse(shlex.split(command)[2:]).requests(tiny_pipe.config)
    assert request == clip.request and request.index == 1


@pytest.mark.slow
def test_it_begins_with_the_packaged_student(one_rank):
    studio = Studio(folder=None, num_video_frames=1, height=64, width=64)
    assert studio.pipe.config.model.student and "guidance" not in studio.controls
    assert studio.draw("A red moth.", seed=3).frames.shape == (1, 64, 64, 3)
