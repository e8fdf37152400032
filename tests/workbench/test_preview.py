"""The sampler preview, with a pipeline that has a closed form: each step moves the estimate towards a known picture."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from dfm_nb.generate import Generated, Request
from dfm_nb.generation.pipeline import Clips
from workbench.preview import SamplerPreview, Stopped, strip_steps

TARGET = 200


class Estimate:
    """A clip of three frames, the middle one at `level`; notes when it is decoded."""

    def __init__(self, level: int, decoded: list[int]):
        self.level, self.decoded = level, decoded

    @property
    def frames(self) -> np.ndarray:
        self.decoded.append(self.level)
        return np.stack([np.full((32, 32, 3), v, np.uint8) for v in (0, self.level, 255)])


class ClosedForm:
    """After step k of n the estimate's middle frame is the constant TARGET * k / n."""

    def __init__(self, wait_s: float = 0.0):
        self.wait_s, self.calls, self.decoded = wait_s, [], []
        self.recommended = {"num_steps": 18, "guidance": 2.0, "sampler": "heun"}

    def __call__(self, prompts, callback=None, **settings):
        self.calls.append((prompts, settings))
        request = Request(prompts[0], **settings)
        for k in range(1, request.num_steps + 1):
            time.sleep(self.wait_s)
            if callback is not None:
                level = round(TARGET * k / request.num_steps)
                callback(k, request.num_steps, [Estimate(level, self.decoded)])
        return Clips([Generated(np.full((1, 32, 32, 3), TARGET, np.uint8), request, torch.zeros(4, 1, 4, 4))])


def test_filmstrip_goes_from_first_to_last_step():
    preview = SamplerPreview(ClosedForm(), "a moth")
    clips = preview.draw(num_steps=20, seed=3)
    assert [s for s, _ in preview.frames] == [1, 4, 6, 9, 12, 15, 17, 20]
    levels = [int(f.mean()) for _, f in preview.frames]
    assert levels == sorted(levels) and levels[-1] == TARGET and clips[0].request.seed == 3
    assert preview.filmstrip().shape == (32, 8 * 32 + 7 * 4, 3)
    assert "a moth: estimates after steps 1, 4, 6" in preview._repr_html_()


def test_only_shown_steps_are_decoded():
    pipe = ClosedForm()
    SamplerPreview(pipe).draw(num_steps=100)
    assert len(pipe.decoded) == 8


@pytest.mark.parametrize("num_steps", [1, 2, 7, 8, 35])
def test_strip_has_first_and_last_step(num_steps):
    steps = strip_steps(num_steps)
    assert steps[0] == 1 and steps[-1] == num_steps and len(set(steps)) == len(steps) == min(8, num_steps)


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_widget_draws_in_a_thread_and_steps_back():
    pipe = ClosedForm(wait_s=0.02)
    preview = SamplerPreview(pipe, "a moth", height=32, width=32)
    preview.widget  # noqa: B018
    preview._inputs["num_steps"].value, preview._inputs["guidance"].value = 10, 3.5
    began = time.monotonic()
    preview._draw.click()
    assert time.monotonic() - began < 0.15 and preview._draw.disabled and not preview._halt.disabled
    wait_for(lambda: preview.message.startswith("done") and not preview._draw.disabled)
    prompts, settings = pipe.calls[0]
    assert prompts == ["a moth"] and settings == {
        "guidance": 3.5,
        "num_steps": 10,
        "seed": 1,
        "sampler": "heun",
        "height": 32,
        "width": 32,
    }
    last = preview._image.value
    preview._back.value = 0
    assert preview._image.value != last and "after step 1 of 10" in preview._image.value
    assert 'alt="a moth' in preview._result.value


def test_stop_ends_after_the_current_step():
    pipe = ClosedForm(wait_s=0.05)
    preview = SamplerPreview(pipe, "a moth")
    preview.widget  # noqa: B018
    preview._inputs["num_steps"].value = 100
    preview._draw.click()
    wait_for(lambda: preview.frames)
    preview._halt.click()
    wait_for(lambda: preview.message == "stopped" and not preview._draw.disabled)
    assert preview.clips is None and preview.frames[-1][0] < 50


def test_error_of_the_pipeline_is_shown_and_raised():
    preview = SamplerPreview(ClosedForm(), "p")
    with pytest.raises(TypeError, match="no_such_setting"):
        preview.draw(no_such_setting=1)
    preview.settings["no_such_setting"] = 1
    preview.widget  # noqa: B018
    preview._draw.click()
    wait_for(lambda: preview.message.startswith("failed") and not preview._draw.disabled)
    assert "no_such_setting" in preview.message


def test_one_drawing_at_a_time():
    preview = SamplerPreview(ClosedForm(wait_s=0.1), "p")

    def draw():
        with pytest.raises(Stopped):
            preview.draw()

    thread = threading.Thread(target=draw)
    thread.start()
    wait_for(lambda: preview.frames)
    with pytest.raises(ValueError, match="is being generated"):
        preview.draw()
    preview.stop()
    thread.join(5)
    assert not thread.is_alive()
