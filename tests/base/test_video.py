"""Pictures and clips survive their files: modes, orientation, rates, sizes and what cannot be read."""

from __future__ import annotations

import base64
import io
import re
import struct
import time
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dfm_nb.base import video
from dfm_nb.base.records import SampleError


def gradient(t=9, h=48, w=64):
    """A smooth moving picture, cheap to compress well."""
    y, x, k = np.mgrid[0:h, 0:w][0], np.mgrid[0:h, 0:w][1], np.arange(t)[:, None, None]
    planes = [128 + 100 * np.sin(x / 15 + k / 3), 255 * y / h + 0 * k, 60 + 20 * k + 0 * x]
    return np.stack([np.broadcast_to(p, (t, h, w)) for p in planes], -1).clip(0, 255).astype(np.uint8)


def png(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **options)
    return buffer.getvalue()


# ---- images -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "P", "RGB", "RGBA", "CMYK"])
def test_read_image_gives_rgb(mode, tmp_path):
    source = Image.fromarray(gradient(1)[0]).convert(mode)
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    source.save(path)
    image = video.read_image(path)
    assert image.dtype == np.uint8 and image.shape == (1, 48, 64, 3)
    assert np.abs(image[0].astype(int) - np.asarray(source.convert("RGB"))).max() <= 1


def test_read_image_composites_on_the_background():
    rgba = np.zeros((16, 16, 4), np.uint8)
    rgba[:, 8:] = (200, 0, 0, 255)
    image = video.read_image(png(Image.fromarray(rgba)), background=(1, 2, 3))[0]
    assert image[0, 0].tolist() == [1, 2, 3] and image[0, 15].tolist() == [200, 0, 0]
    palette = Image.fromarray(np.zeros((16, 16), np.uint8), "L").convert("P")
    assert (video.read_image(png(palette, transparency=0), background=(9, 8, 7)) == np.array([9, 8, 7])).all()


def test_read_image_applies_exif_orientation():
    frame = gradient(1)[0]
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    assert np.array_equal(video.read_image(png(Image.fromarray(frame), exif=exif))[0], np.rot90(frame, -1))


UNREADABLE = [
    (video.read_image, "a.png", b"", "unreadable_image"),
    (video.read_image, "a.png", png(Image.new("RGB", (64, 64), "red"))[:60], "unreadable_image"),
    (video.read_image, "a.png", b"P5 16 16 255\n" + bytes(256), "unreadable_image"),  # a picture, of no allowed format
    (video.read_image, "a.png", png(Image.fromarray(np.zeros((16, 16), np.uint16))), "unreadable_image"),  # 16 bits
    (video.read_image, "a.png", None, "missing_file"),
    (video.read_video, "a.mp4", b"nothing to see", "unreadable_video"),
    (video.read_video, "a.mp4", None, "missing_file"),
]


@pytest.mark.parametrize("read, name, content, reason", UNREADABLE)
def test_what_is_unreadable_is_named(tmp_path, read, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SampleError, match=name) as caught:
        read(tmp_path / name)
    assert caught.value.reason == reason and "\n" not in caught.value.detail


# ---- moving pictures ----------------------------------------------------------------------------------------------


def test_animation_keeps_frames_and_rate(tmp_path):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
    frames = [Image.new("RGB", (20, 20), c) for c in colours]
    for name in ("a.gif", "a.webp"):
        options = {"lossless": True} if name.endswith("webp") else {}
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=50, loop=0, **options)
        out, fps = video.read_still_or_animation(tmp_path / name)
        assert out.shape == (4, 20, 20, 3) and fps == pytest.approx(20)
        assert [tuple(f[0, 0].tolist()) for f in out] == colours
    slow, fps = video.read_video(tmp_path / "a.gif", fps=10)
    assert fps == 10 and [tuple(f[0, 0].tolist()) for f in slow] == colours[::2]


def test_mp4_round_trip_is_close_and_leaves_one_file_with_its_header_first(tmp_path):
    clip = gradient()
    video.write_mp4(tmp_path / "a.mp4", clip, 8, crf=8)
    out, fps = video.read_video(tmp_path / "a.mp4")
    assert out.shape == clip.shape and fps == 8
    assert np.abs(out.astype(int) - clip).mean() < 3
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.find(b"moov") < data.find(b"mdat")
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize("colour", [(220, 40, 40), (40, 190, 60), (40, 70, 220), (255, 255, 255), (0, 0, 0)])
def test_colours_do_not_shift_where_they_are_written_or_shown(tmp_path, colour):
    clip = np.broadcast_to(np.array(colour, np.uint8), (2, 31, 33, 3)).copy()
    video.write_mp4(tmp_path / "a.mp4", clip, 12.5, crf=4)
    (tmp_path / "b.mp4").write_bytes(video.compressed(clip, 12.5)[1])
    for name in ("a.mp4", "b.mp4"):
        out, fps = video.read_video(tmp_path / name)
        assert out.shape == (2, 32, 34, 3) and fps == pytest.approx(12.5)  # odd sides are padded
        assert np.abs(out[:, :31, :33].astype(int) - clip).max() <= 3


@pytest.mark.parametrize("fps, frames", [(None, 8), (8, 8), (4, 4), (2, 2), (16, 16), (6, 6)])
def test_read_video_resamples_in_time(fps, frames, tmp_path):
    levels = np.arange(8) * 30
    clip = np.broadcast_to(levels[:, None, None, None].astype(np.uint8), (8, 32, 32, 3))
    video.write_mp4(tmp_path / "a.mp4", clip, 8, crf=4)
    out, rate = video.read_video(tmp_path / "a.mp4", fps=fps)
    assert rate == (fps or 8) and len(out) == frames
    shown = (np.arange(frames) * 8 / rate + 1e-6).astype(int)
    assert np.abs(out[:, 16, 16, 0].astype(int) - levels[shown]).max() <= 3


def test_a_playlist_called_a_video_opens_nothing_else(tmp_path):
    video.write_mp4(tmp_path / "secret.mp4", gradient(), 8)
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile secret.mp4\n")
    with pytest.raises(SampleError, match="list.mp4") as caught:
        video.read_video(tmp_path / "list.mp4")
    assert caught.value.reason == "unreadable_video"


def test_a_frame_that_stays_for_a_week_is_not_resampled_without_end():
    timed = [(0.0, gradient(1)[0]), (7 * 86400.0, gradient(1)[0])]
    with pytest.raises(SampleError, match="long.mkv") as caught:
        assert sum(1 for _ in video.held(timed, 24, 24, "long.mkv")) <= video.FRAMES_PER_STORED
    assert caught.value.reason == "too_long"


def test_read_video_applies_display_rotation(tmp_path):
    clip = gradient(1, 32, 64)
    video.write_mp4(tmp_path / "a.mp4", clip, 8, crf=4)
    data = (tmp_path / "a.mp4").read_bytes()
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    turned = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    at = data.index(upright, data.index(b"tkhd"))
    (tmp_path / "b.mp4").write_bytes(data[:at] + turned + data[at + len(upright) :])
    out, _ = video.read_video(tmp_path / "b.mp4")
    assert out.shape == (1, 64, 32, 3)
    assert np.abs(out[0].astype(int) - np.rot90(clip[0], -1)).mean() < 4


def test_what_decodes_to_too_much_is_refused(tmp_path, monkeypatch):
    clip = gradient(9)
    video.write_mp4(tmp_path / "a.mp4", clip, 8)
    stills = [Image.fromarray(f) for f in clip]
    stills[0].save(tmp_path / "a.gif", save_all=True, append_images=stills[1:], duration=50)
    monkeypatch.setattr(video, "MAX_BYTES", 5 * clip[0].nbytes)
    for name in ("a.mp4", "a.gif"):
        with pytest.raises(SampleError, match=name) as caught:
            video.read_video(tmp_path / name)
        assert caught.value.reason == "too_long"


def test_a_picture_that_unpacks_to_gigabytes_is_refused():
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(bytes(999))
    chunks = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, pixels))
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    with pytest.raises(SampleError) as caught:
        video.read_image(bomb)
    assert caught.value.reason == "too_large"


# ---- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given_size, short, upscale, expected",
    [
        ((768, 1024), 512, False, (512, 672)),
        ((1024, 768), 512, False, (672, 512)),
        ((64, 96), 64, False, (64, 96)),
        ((50, 70), 64, False, (48, 64)),
        ((50, 70), 64, True, (64, 80)),
        ((100, 100), 64, False, (64, 64)),
        ((16, 128), 64, False, (16, 128)),
    ],
)
def test_fit_size_matches_worked_examples(given_size, short, upscale, expected):
    assert video.fit_size(*given_size, short, upscale=upscale) == expected


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([16, 64, 256, 500]), st.booleans())
def test_fit_size_is_a_multiple_and_never_upscales_unasked(h, w, short, upscale):
    try:
        fh, fw = video.fit_size(h, w, short, upscale=upscale)
    except SampleError as error:
        assert error.reason in ("too_small", "extreme_aspect") and (min(h, w) < 16 or max(h, w) > 8 * min(h, w))
        return
    assert fh % 16 == fw % 16 == 0 and 16 <= min(fh, fw) <= short
    assert upscale or (fh <= h and fw <= w)


def test_resize_keeps_the_centre_and_the_aspect():
    frame = np.zeros((1, 64, 128, 3), np.uint8)
    frame[:, :, 32:96] = 200  # the centred square
    out = video.resize(frame, 32, 32)
    assert out.shape == (1, 32, 32, 3) and (out[:, :, 2:-2] >= 198).all()
    assert np.array_equal(video.resize(gradient(), 48, 64), gradient())


# ---- showing ------------------------------------------------------------------------------------------------------


def test_contact_sheet_shows_every_picture_and_keeps_a_caption_in_its_cell():
    started = time.process_time()
    pictures = [np.full((t, 128, 128, 3), c, np.uint8) for t, c in [(1, 10), (9, 90), (1, 170), (17, 230)]]
    sheet = video.contact_sheet(pictures, ["W" * 100_000, "", "", ""], columns=4)
    assert time.process_time() - started < 5  # over 60 s when each cut measured the whole word
    for c in (10, 90, 170, 230):
        assert (sheet == c).all(-1).sum() > 128 * 120
    cell = video.GAP_PX + 128
    below = (sheet[cell:] == video.INK).all(-1)
    assert below[:, :cell].any() and not below[:, cell:].any()
    assert len(sheet) == cell + video.LINE_PX * (1 + video.CAPTION_LINES) + video.GAP_PX


def test_inline_html_carries_the_clip_and_escapes_the_caption(tmp_path):
    text = video.inline_html(gradient(5), 8, 'a <b>"bold"</b> & blue one')
    assert "<b>" not in text and "&lt;b&gt;&quot;bold&quot;" in text
    data = re.search(r'src="data:video/mp4;base64,([^"]+)"', text).group(1)
    (tmp_path / "a.mp4").write_bytes(base64.b64decode(data))
    assert video.read_video(tmp_path / "a.mp4")[0].shape == (5, 48, 64, 3)
    poster = re.search(r'poster="data:image/png;base64,([^"]+)"', text).group(1)
    assert np.array_equal(video.read_image(base64.b64decode(poster)), gradient(5)[:1])
