"""Pictures and clips survive their files: modes, orientation, rates, sizes and what cannot be read."""

import base64
import io
import struct
import zlib
from fractions import Fraction
from itertools import starmap

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms

from dfm_nb.base import video
from dfm_nb.base.records import SampleError
from tests.frames import animate, black, counting_clip, gradient, off
from tests.refusals import refused


def png(image: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **{"format": "PNG"} | options)
    return buffer.getvalue()


def read_all(data) -> tuple[np.ndarray, list[float], set[str]]:
    """Frames, seconds that each is shown, and what is lost."""
    lost: video.Lost = {}
    frames, durations_s = video.read_still_or_animation(data, video.WHITE, lost)
    return frames, durations_s, {*lost}


def reason_of(read, *given, name="") -> str:
    """Why it is not read."""
    return refused(name, read, *given, error=SampleError).reason


# ---- images -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "P", "RGB", "RGBA", "CMYK"])
def test_read_image_gives_rgb(mode, tmp_path):
    source = Image.fromarray(gradient(1)[0]).convert(mode)
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    source.save(path)
    image = video.read_image(path)
    assert image.dtype == np.uint8 and image.shape == (1, 48, 64, 3)
    assert off(image[0], np.asarray(source.convert("RGB"))) <= 1


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


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_of_16_bits_the_high_byte_is_kept(name, tmp_path):
    values = np.arange(0, 65536, 16, np.uint16).reshape(64, 64)
    Image.fromarray(values).save(tmp_path / name)
    assert np.array_equal(video.read_image(tmp_path / name)[0], np.stack([values >> 8] * 3, -1))


def with_primaries(colorants) -> bytes:
    """The profile of sRGB with other primaries, in XYZ by D50."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for i in range(int.from_bytes(profile[128:132])):
        name, at, _ = struct.unpack_from(">4sII", profile, 132 + 12 * i)
        if name[:1] in colorants and name[1:] == b"XYZ":
            struct.pack_into(">3i", profile, at + 8, *(round(65536 * v) for v in colorants[name[:1]]))
    return bytes(profile).replace("sRGB".encode("utf-16-be"), "P3 a".encode("utf-16-be"))


P3 = with_primaries({b"r": (0.5151, 0.2412, -0.0011), b"g": (0.2919, 0.6922, 0.0419), b"b": (0.1571, 0.0666, 0.7841)})


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_a_colour_profile_is_converted_to_srgb(mode):
    """Apple's Display P3, by a matrix of its specification: 95 157 75 there is 70 160 60."""
    picture = Image.new("RGB", (16, 16), (95, 157, 75)).convert(mode, palette=Image.Palette.ADAPTIVE)
    shown = video.read_image(png(picture, icc_profile=P3))[0, 8, 8]
    assert off(shown, (70, 160, 60)) <= 3
    ignored, _, lost = read_all(png(picture, icc_profile=b"no profile"))
    assert np.array_equal(ignored[0], picture.convert("RGB")) and lost == {"colour_profile"}


def png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def described(pixel, *chunks, size=(16, 16), **options) -> bytes:
    """A PNG with (name, content) before its pixels; an AVIF whose first content replaces its code points."""
    data = png(Image.new("RGB", size, pixel), **options)
    if data[:4] != b"\x89PNG":
        at = data.index(b"colrnclx") + 8
        return data[:at] + chunks[0][1] + data[at + 4 :]
    return data[:33] + b"".join(starmap(png_chunk, chunks)) + data[33:]


CHRM = b"cHRM", struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)
DESCRIBED = [
    ((16, 90, 12), {}, (b"gAMA", struct.pack(">I", 100_000))),
    ((95, 157, 75), {}, CHRM),
    ((95, 157, 75), {}, (b"cICP", bytes([12, 13, 0, 1]))),
    ((70, 160, 60), {"icc_profile": P3}, (b"cICP", bytes([1, 13, 0, 1]))),
    ((70, 160, 60), {}, (b"sRGB", b"\0"), CHRM),
    ((70, 160, 60), {}, (b"gAMA", struct.pack(">I", 45_455))),
    ((95, 157, 75), {"format": "AVIF", "quality": 100}, (b"nclx", struct.pack(">HH", 12, 13))),
]


@pytest.mark.parametrize("pixel, options, chunks", [(pixel, options, chunks) for pixel, options, *chunks in DESCRIBED])
def test_colours_that_no_icc_profile_describes_are_those_of_a_browser(pixel, options, chunks):
    out, _, lost = read_all(described(pixel, *chunks, **options))
    assert off(out[0, 8, 8], (70, 160, 60)) <= 4 and not lost


def test_colours_that_cannot_be_converted_are_reported():
    assert read_all(described((9, 9, 9), (b"gAMA", struct.pack(">I", 55_556))))[2] == {"colour_profile"}


HEIC = base64.b64decode(
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAX1tZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAAAAAAACJpbG9jAA"
    "AAAERAAAEAAQAAAAABoQABAAAAAAAAAGYAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABodmMxAAAAAA5waXRtAAAAAAABAAAA/WlwcnAA"
    "AADdaXBjbwAAAHZodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQAqQgEBA3AAAAMAkA"
    "AAAwAAAwAeoCCBBZbq5Ka5uAhoMCAAAAMDIAAAAwAhYgABAAZEAcFzwIkAAAATY29scm5jbHgAAQANAAaAAAAAFGlzcGUAAAAAAAAAQAAAAEAA"
    "AAAoY2xhcAAAADAAAAABAAAAIAAAAAH////wAAAAAv///+AAAAACAAAAEHBpeGkAAAAAAwgICAAAABhpcG1hAAAAAAAAAAEAAQWBAgMFhAAAAG"
    "5tZGF0AAAAYigBrwY48XPe9tv6LG/yP33N//6OVBD4JE3z9v//jb3b/gkUUcLwp1+Pr7P9RxXZcYdiXP6h7Nj3MNvdp9E6f/56oYv81/U9Z5NX"
    "NjfXzfCXUawA3iYavgDfPWcD3WbUBxjc"
)
"""48 x 32 px of (200 40 40), the upper left quarter (40 60 200)."""


def test_heic_and_jpeg_2000_are_read():
    shown = video.read_image(HEIC)[0].astype(int)
    assert np.abs(shown[4, 4] - (40, 60, 200)).max() < 3 and np.abs(shown[-4, -4] - (200, 40, 40)).max() < 3
    picture = gradient(1)[0]
    assert np.array_equal(video.read_image(png(Image.fromarray(picture), format="JPEG2000"))[0], picture)


UNREADABLE = [
    (video.read_image, "a.png", b"", "unreadable_image"),
    (video.read_image, "a.png", png(Image.new("RGB", (64, 64), "red"))[:60], "unreadable_image"),
    (video.read_image, "a.png", b"P5 16 16 255\n" + bytes(256), "unreadable_image"),  # a picture, of no allowed format
    (video.read_image, "a.tif", png(Image.new("F", (16, 16)), format="TIFF"), "unreadable_image"),  # of unknown white
    (video.read_image, "a.png", None, "missing_file"),
    (video.read_video, "a.mp4", b"nothing to see", "unreadable_video"),
    (video.read_video, "a.mp4", None, "missing_file"),
]


@pytest.mark.parametrize("read, name, content, reason", UNREADABLE)
def test_what_is_unreadable_is_named(tmp_path, read, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert reason_of(read, tmp_path / name, name=name) == reason


# ---- moving pictures ----------------------------------------------------------------------------------------------


def test_animation_keeps_frames_and_rate(tmp_path):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]
    for name in ("a.gif", "a.webp"):
        options = {"lossless": True} if name.endswith("webp") else {}
        frames = [np.full((20, 20, 3), c, np.uint8) for c in colours]
        animate(tmp_path / name, frames, duration=50, loop=0, **options)
        out, durations_s, _ = read_all(tmp_path / name)
        assert out.shape == (4, 20, 20, 3) and durations_s == [0.05] * 4
        assert [tuple(f[0, 0].tolist()) for f in out] == colours
    slow, fps = video.read_video(tmp_path / "a.gif", fps=10)
    assert fps == 10 and [tuple(f[0, 0].tolist()) for f in slow] == colours[::2]


def test_the_poster_of_an_animation_is_no_frame():
    first, *rest = [Image.new("RGB", (16, 16), c) for c in ("red", "lime", "blue")]
    moving = png(first, save_all=True, append_images=rest, default_image=True, duration=40)
    out, durations_s, _ = read_all(moving)
    assert out[:, 0, 0].tolist() == [[0, 255, 0], [0, 0, 255]] and durations_s == [0.04, 0.04]
    assert np.array_equal(video.read_image(moving)[0], out[0])


def test_an_animation_that_is_cut_keeps_its_good_frames():
    noise = np.random.default_rng(0).integers(0, 255, (6, 64, 64), np.uint8)
    first, *rest = map(Image.fromarray, noise)
    data = png(first, format="GIF", save_all=True, append_images=rest, duration=50)
    out, _, lost = read_all(data[: len(data) * 7 // 10])
    assert np.array_equal(out[..., 0], noise[:4]) and lost == {"cut_short"}
    for size in range(len(data) // 2, len(data), 37):  # also inside the header of a frame
        out, *_ = read_all(data[:size])
        assert np.array_equal(out[:2, ..., 0], noise[:2])


def test_further_pages_of_a_tiff_are_named():
    pages = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    out, _, lost = read_all(png(pages[0], format="TIFF", save_all=True, append_images=pages[1:]))
    assert out[:, 0, 0].tolist() == [[255, 0, 0]] and lost == {"pages"}


def test_mp4_round_trip_is_close_and_leaves_one_file_with_its_header_first(tmp_path):
    clip = gradient()
    video.write_mp4(tmp_path / "a.mp4", clip, 8, crf=8)
    out, fps = video.read_video(tmp_path / "a.mp4")
    assert out.shape == clip.shape and fps == 8
    assert np.abs(out.astype(int) - clip).mean() < 3
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.find(b"moov") < data.find(b"mdat")
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize("colour", [(220, 40, 40), (40, 70, 220), (255, 255, 255)])
def test_colours_do_not_shift_where_they_are_written_or_shown(tmp_path, colour):
    clip = np.broadcast_to(np.array(colour, np.uint8), (2, 31, 33, 3)).copy()
    video.write_mp4(tmp_path / "a.mp4", clip, 12.5, crf=4)
    (tmp_path / "b.mp4").write_bytes(video.compressed(clip, 12.5)[1])
    for name in ("a.mp4", "b.mp4"):
        out, fps = video.read_video(tmp_path / name)
        assert out.shape == (2, 32, 34, 3) and fps == pytest.approx(12.5)  # odd sides are padded
        assert off(out[:, :31, :33], clip) <= 3


@pytest.mark.parametrize("fps, frames", [(None, 8), (2, 2), (16, 16), (6, 6)])
def test_read_video_resamples_in_time(fps, frames, tmp_path):
    video.write_mp4(tmp_path / "a.mp4", counting_clip(8, 30), 8, crf=4)
    out, rate = video.read_video(tmp_path / "a.mp4", fps=fps)
    assert rate == (fps or 8) and len(out) == frames
    shown = (np.arange(frames) * 8 / rate + 1e-6).astype(int)
    assert off(out[:, 16, 16, 0], 30 * shown) <= 3


def test_a_playlist_called_a_video_opens_nothing_else(tmp_path):
    video.write_mp4(tmp_path / "secret.mp4", gradient(), 8)
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile secret.mp4\n")
    assert reason_of(video.read_video, tmp_path / "list.mp4", name="list.mp4") == "unreadable_video"


def test_a_frame_that_stays_for_a_week_is_not_resampled_without_end():
    timed = [(0.0, gradient(1)[0]), (7 * 86400.0, gradient(1)[0])]
    with pytest.raises(SampleError, match="long.mkv") as caught:
        assert sum(1 for _ in video.held(timed, 24, 24, "long.mkv")) <= video.FRAMES_PER_STORED
    assert caught.value.reason == "too_long"


TURNS = {
    (0, 1, -1, 0): lambda x: np.rot90(x, -1),
    (0, -1, 1, 0): np.rot90,
    (-1, 0, 0, -1): lambda x: np.rot90(x, 2),
    (-1, 0, 0, 1): np.fliplr,
    (0, 1, 1, 0): lambda x: x.swapaxes(0, 1),
}


@pytest.mark.parametrize("matrix, shown", TURNS.items())
def test_read_video_applies_the_display_matrix(matrix, shown, tmp_path):
    clip = gradient(1, 32, 64)
    video.write_mp4(tmp_path / "a.mp4", clip, 8, crf=4)
    data = (tmp_path / "a.mp4").read_bytes()
    packed = [
        struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
        for a, b, c, d in ((1, 0, 0, 1), matrix)
    ]
    at = data.index(packed[0], data.index(b"tkhd"))
    (tmp_path / "b.mp4").write_bytes(data[:at] + packed[1] + data[at + 36 :])
    out, _ = video.read_video(tmp_path / "b.mp4")
    assert np.abs(out[0].astype(int) - shown(clip[0])).mean() < 4


def write_frames(path, frames, codec="libx264", kind="yuv420p", **tags):
    """25 frames a second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.height, stream.width, stream.pix_fmt = frames[0].height, frames[0].width, kind
        if codec == "libx264":
            stream.options = {"crf": "4"}
        for name, value in tags.items():
            setattr(stream.codec_context, name, value)
        for frame in [*frames, None]:
            container.mux(stream.encode(frame))


def write_flat(path, yuv, size=(64, 64), bits=8, **tags):
    """One frame of a colour, given as numbers of `bits`."""
    kind = "yuv420p10le" if bits == 10 else "yuv420p"
    frame = av.VideoFrame(size[1], size[0], kind)
    for plane, value in zip(frame.planes, yuv):
        count = plane.buffer_size * 8 // (16 if bits == 10 else 8)
        plane.update(np.full(count, value, f"u{1 + bits // 10}").tobytes())
    write_frames(path, [frame], kind=kind, **tags)


HDR = {"colorspace": 9, "color_primaries": 9, "color_range": 1}
SHOWN = [  # as BT.2100 and BT.709 define them
    ({"bits": 10, "color_trc": 18, **HDR}, (721, 512, 512), (255, 255, 255)),  # HLG's 75 %
    ({"bits": 10, "color_trc": 16, **HDR}, (573, 512, 512), (255, 255, 255)),  # PQ's 203 cd/m2
    ({"bits": 10, "color_trc": 18, **HDR}, (375, 420, 692), (220, 30, 30)),
    ({"size": (720, 64)}, (76, 109, 211), (220, 30, 30)),  # not tagged: HD is BT.709, less is BT.601
    ({"size": (64, 64)}, (91, 100, 211), (220, 30, 30)),
]


@pytest.mark.parametrize("how, yuv, colour", SHOWN)
def test_colours_are_those_that_players_show(how, yuv, colour, tmp_path):
    write_flat(tmp_path / "a.mp4", yuv, **how)
    out, _ = video.read_video(tmp_path / "a.mp4")
    assert off(out[0, 32, 32], colour) <= (9 if "bits" in how else 4)


def write_packets(path, *parts, start_s=0, **tags):
    """Clips of one stream, one after the other, whatever size each has; the first begins at `start_s`."""
    with av.open(str(path), "w") as container:
        stream, begin = None, start_s * 10
        for part in parts:
            codec = "libvpx" if path.suffix == ".webm" else "libx264"
            encoder = stream = container.add_stream(codec, rate=10) if stream is None else stream
            if part is not parts[0]:
                encoder = av.CodecContext.create(codec, "w")
                encoder.time_base, encoder.framerate = Fraction(1, 10), Fraction(10)
            encoder.height, encoder.width, encoder.pix_fmt = *part.shape[1:3], "yuv420p"
            for name, value in tags.items():
                setattr(encoder.codec_context, name, value)
            packets = []
            for at, array in enumerate(part, begin):
                frame = av.VideoFrame.from_ndarray(array, format="rgb24")
                frame.pts, frame.time_base = at, Fraction(1, 10)
                packets += encoder.encode(frame)
            begin += len(part)
            for packet in [*packets, *encoder.encode(None)]:
                packet.stream = stream
                container.mux(packet)


def noise(t):
    return np.random.default_rng(0).integers(0, 255, (t, 64, 64, 3)).astype(np.uint8)


@pytest.mark.parametrize("suffix, start_s", [("mp4", 0), ("mp4", 3), ("mkv", 3), ("webm", 3), ("flv", 3)])
def test_a_file_that_was_copied_in_part_says_so(suffix, start_s, tmp_path):
    """Half of its bytes decode without a fault; its clock may begin later than at 0."""
    whole = tmp_path / f"a.{suffix}"
    write_packets(whole, noise(49), start_s=start_s)
    assert len(video.read_video(whole)[0]) == 49 and len(video.read_video(whole, fps=20)[0]) == 98
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert reason_of(video.read_video, whole) == "unreadable_video"


def read_up_to_a_fault(path):
    good = []
    with pytest.raises(SampleError, match=path.name), video.open_video(path) as (frames, _):
        good.extend(frames)
    return good


def test_a_damaged_video_is_read_up_to_the_damage(tmp_path):
    video.write_mp4(tmp_path / "a.mp4", noise(40), 10)
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    at = len(data) * 3 // 4
    data[at : at + 20_000] = bytes(20_000)
    (tmp_path / "b.mp4").write_bytes(data)
    good, whole = read_up_to_a_fault(tmp_path / "b.mp4"), video.read_video(tmp_path / "a.mp4")[0]
    assert 20 < len(good) < 35 and np.array_equal(good[:20], whole[:20])


def test_frames_of_another_aspect_end_a_video_and_smaller_ones_are_scaled(tmp_path):
    wide = black(6, 64, 128)
    wide[:, 16:48, 16:48] = 255
    write_packets(tmp_path / "a.webm", wide, wide.swapaxes(1, 2).copy())
    assert len(read_up_to_a_fault(tmp_path / "a.webm")) == 6
    write_packets(tmp_path / "b.webm", wide, wide[:, ::2, ::2].copy())
    out, _ = video.read_video(tmp_path / "b.webm")
    assert len(out) == 12 and np.abs(out.astype(int) - wide[0]).mean() < 6


def test_a_tag_in_another_encoding_is_no_fault(tmp_path):
    video.write_mp4(tmp_path / "a.mp4", gradient(), 8, comment="caf_")
    data = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(data.replace(b"caf_", "café".encode("latin-1")))
    assert len(video.read_video(tmp_path / "a.mp4")[0]) == 9 and video.read_comment(tmp_path / "a.mp4")[:3] == "caf"


@pytest.mark.parametrize("codec, kind, suffix", [("png", "rgba", "mov"), ("libvpx-vp9", "yuva420p", "webm")])
def test_transparent_pixels_of_a_video_show_the_background(codec, kind, suffix, tmp_path):
    half = np.full((64, 64, 4), (200, 30, 30, 255), np.uint8)
    half[:, 32:, 3] = 0
    frame = av.VideoFrame.from_ndarray(half, format="rgba").reformat(format=kind)
    write_frames(tmp_path / f"a.{suffix}", [frame], codec, kind)
    with video.open_video(tmp_path / f"a.{suffix}", background=(0, 0, 255)) as (frames, _):
        (shown,) = frames
    assert np.abs(shown[32, [8, 56]].astype(int) - [(200, 30, 30), (0, 0, 255)]).max() <= 4


@pytest.mark.parametrize("suffix", ["avi", "ts", "flv"])
def test_frames_are_shown_once_and_in_order_whatever_times_a_container_has(suffix, tmp_path):
    frames = [av.VideoFrame.from_ndarray(frame.copy(), format="rgb24") for frame in counting_clip(25, 10, 64)]
    write_frames(tmp_path / f"a.{suffix}", frames, max_b_frames=3)
    out, _ = video.read_video(tmp_path / f"a.{suffix}", fps=25)
    assert np.round(out[:, 32, 32, 0] / 10).tolist() == list(range(25))


def test_what_decodes_to_too_much_is_refused(tmp_path, monkeypatch):
    clip = gradient(9)
    video.write_mp4(tmp_path / "a.mp4", clip, 8)
    animate(tmp_path / "a.gif", clip, duration=50)
    monkeypatch.setattr(video, "MAX_BYTES", 5 * clip[0].nbytes)
    for name in ("a.mp4", "a.gif"):
        assert reason_of(video.read_video, tmp_path / name, name=name) == "too_long"


def test_a_picture_that_unpacks_to_gigabytes_is_refused():
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(bytes(999)))
    assert reason_of(video.read_image, bomb) == "too_large"


# ---- sizes --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from([16, 64, 256, 500]), st.booleans())
def test_fit_size_is_the_nearest_multiple_and_crops_little(h, w, short, upscale):
    try:
        fh, fw = video.fit_size(h, w, short, upscale=upscale)
    except SampleError as error:
        assert error.reason in ("too_small", "extreme_aspect") and (min(h, w) < 16 or max(h, w) > 8 * min(h, w))
        return
    scale = short / min(h, w) if upscale or min(h, w) > short else 1
    assert fh % 16 == fw % 16 == 0 and abs(fh - h * scale) <= 8.001 and abs(fw - w * scale) <= 8.001
    assert (
        video.cropped_share(h, w, (fh, fw)) <= 1 - (1 - 8 / (min(h, w) * scale)) / (1 + 8 / (min(h, w) * scale)) + 1e-9
    )


def test_resize_keeps_the_centre_and_the_aspect():
    frame = black(1, 64, 128)
    frame[:, :, 32:96] = 200  # the centred square
    out = video.resize(frame, 32, 32)
    assert out.shape == (1, 32, 32, 3) and (out[:, :, 2:-2] >= 198).all()
    assert np.array_equal(video.resize(gradient(), 48, 64), gradient())


def test_resize_keeps_the_edge_that_is_asked_for_or_pads_with_the_pictures_own():
    frame = black(1, 32, 64)
    frame[:, :, :32] = 200
    kept = {fit: video.resize(frame, 32, 32, fit)[0, 16, :, 0].mean() for fit in ("crop-left", "crop", "crop-right")}
    assert kept["crop-left"] > 190 > kept["crop"] > 90 > 10 > kept["crop-right"]
    padded = video.resize(frame, 64, 64, "pad")
    assert padded.shape == (1, 64, 64, 3) and np.array_equal(padded[0, 16:48], frame[0])
    assert (padded[0, :, :32] == 200).all() and (padded[0, :, 32:] == 0).all()
    assert video.resize(frame[:, :, :63], 32, 64, "pad").shape == (1, 32, 64, 3)
