"""Sheets, and the HTML of clips."""

import base64
import io
import re
import time

import numpy as np
from PIL import Image

from dfm_nb import display
from dfm_nb.base import video
from dfm_nb.base.run import Run
from tests.frames import gradient


def test_contact_sheet_shows_every_picture_and_keeps_a_caption_under_it():
    started = time.process_time()
    first, clip, second, third = (
        np.full((t, 128, 128, 3), c, np.uint8) for t, c in [(1, 10), (9, 90), (1, 170), (1, 230)]
    )
    sections = {"": [([first], "W" * 100_000), ([second], "")], "pairs": [([third, third], "x"), ([clip, clip], "")]}
    sheet = display.contact_sheet(sections, columns=4)
    assert time.process_time() - started < 5  # over 60 s when each cut measured the whole word
    shown = {c: (sheet[..., :3] == c).all(-1) for c in (10, 90, 170, 230)}
    assert {c: s.sum() / 128**2 for c, s in shown.items()} == {10: 1, 90: 8, 170: 1, 230: 2}
    below = sheet[128:256, :, 3]
    assert below[:, :128].any() and not below[:, 128:].any()
    png = Image.open(io.BytesIO(display.small_png(sheet))).convert("RGBA")
    assert png.getextrema()[3] == (0, 255), "a dark page shows between picture and caption"


def test_letters_of_other_scripts_are_no_boxes():
    still = np.zeros((1, 64, 64, 3), np.uint8)
    zhe, shcha = (display.contact_sheet({"": [([still], caption)]}) for caption in "жщ")
    assert not np.array_equal(zhe, shcha)


def test_inline_html_carries_the_clip_and_escapes_the_caption(tmp_path):
    text = display.inline_html(gradient(5), 8, 'a <b>"bold"</b> & blue one')
    assert "<b>" not in text and "&lt;b&gt;&quot;bold&quot;" in text
    assert "<source" not in text  # JupyterLab takes it out of a notebook that it does not trust
    data = re.search(r'src="data:video/mp4;base64,([^"]+)"', text).group(1)
    (tmp_path / "a.mp4").write_bytes(base64.b64decode(data))
    assert video.read_video(tmp_path / "a.mp4")[0].shape == (5, 48, 64, 3)
    still, moving = re.findall(r'(?:poster|<img src)="data:image/webp;base64,([^"]+)"', text)
    assert len(video.read_image(base64.b64decode(still))) == 1
    assert Image.open(io.BytesIO(base64.b64decode(moving))).n_frames == 5, "where a code host removes <video>"


def test_a_png_of_a_notebook_is_bounded():
    noise = np.random.default_rng(0).integers(0, 256, (400, 900, 3), np.uint8)
    made = display.small_png(noise)
    assert len(made) <= display.SHEET_BYTES and 1 < video.read_image(made).shape[2] < 900
    assert video.read_image(display.small_png(gradient(1)[0])).shape == gradient(1).shape


def test_newest_samples_are_those_of_the_last_iteration_that_has_some(tmp_path):
    run = Run.create(tmp_path)
    assert display.newest_samples(run) is None
    for i in (90, 1000):
        for name in ("b.mp4", "a.png", "captions.json", ".part.mp4"):
            (run.sample_folder(i) / name).touch()
    run.sample_folder(2000)
    iteration, media = display.newest_samples(run)
    assert iteration == 1000 and [p.name for p in media] == ["a.png", "b.mp4"]
