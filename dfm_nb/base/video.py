"""Pixels in and out of files: pictures, animations and videos to uint8 [T, H, W, 3], and back to MP4, PNG and HTML.

Input becomes sRGB as viewers and players show it: colour profiles and HDR converted, turned and mirrored by EXIF or the
display matrix, opaque (transparency composited on `background`), with frames per second if it moves. An unreadable
file raises `SampleError` with one sentence, and nothing decodes to more than `MAX_BYTES`.

`lost`, a dict that the readers fill: what a readable file loses, as a sentence by reason.
"""

import contextlib
import io
import itertools
import math
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, ImageSequence, PngImagePlugin

from dfm_nb.base.files import MARK, write_atomically
from dfm_nb.base.geometry import SIDE_MULTIPLE
from dfm_nb.base.limits import MAX_ASPECT, MAX_BYTES, MOST_HEADER
from dfm_nb.base.records import SampleError

_LARGE = threading.Lock()
_TABLES = threading.Lock()
LARGE_PX = 1 << 24
"""Above this many pixels, threads decode pictures one at a time: Pillow and numpy briefly need 20 bytes per pixel."""
ANIMATED_FORMATS = ("GIF", "WEBP", "PNG", "AVIF")  # a TIFF's or an MPO's further pages are not later frames
PICTURE_FORMATS = (*ANIMATED_FORMATS, "JPEG", "JPEG2000", "HEIF", "BMP", "TIFF")  # Pillow's JPEG opens MPO
"""Formats to detect by content, not by file name; not more, because Pillow starts Ghostscript for PostScript."""
VIDEO_FORMATS = dict(
    format_whitelist="mov,matroska,avi,mpeg,mpegts,mpegvideo,gif,asf,flv,ogg", protocol_whitelist="file"
)
"""The same for FFmpeg (Matroska includes WebM), because its playlists would open other files."""
FRAMES_PER_STORED = 240
"""Maximum number of resampled frames per stored one, 10 s at 24 fps: a few bytes can mean "for a week"."""
WHITE = (255, 255, 255)
BT709 = 1  # FFmpeg's code of ITU-R BT.709 for primaries, transfer and matrix
LIMITED_RANGE = 1
SAY_THEIR_LENGTH = ("mov", "matroska", "avi", "flv", "asf")
"""Containers whose first bytes say how long a video is; of others FFmpeg estimates it."""
SAY_THEIR_END = ("matroska", "asf")
"""Those of them whose length counts from 0 of their clock, also where the first frame is later."""
SAME_ASPECT = 0.02  # codecs and scalers round sides
ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""Of codecs whose transparency FFmpeg's own decoders leave out."""
SRGB_TRANSFER = 13
OTHER_TRANSFERS = (8, 16, 18)  # linear, PQ and HLG
WIDE_PRIMARIES = (9, 11, 12)  # BT.2020, DCI-P3, Display P3
CODE_POINTS = re.compile(rb"(?:colrnclx\0|\0\0\0\x04cICP)(.)\0?(.)", re.DOTALL)
"""Primaries and transfer as in videos: AVIF's and HEIF's in 16 bits, PNG's in 8; Pillow leaves them out."""
HEAD_BYTES = 1 << 16  # of a file, in which they are looked for
UNSPECIFIED = 2  # FFmpeg's code of a matrix that a file does not say
HD_HEIGHT_PX = 720
"""From here players take BT.709's matrix for it, and below BT.601's."""
SRGB = ImageCms.createProfile("sRGB")
PNG_PRIMARIES = {
    BT709: (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06),
    9: (0.3127, 0.329, 0.708, 0.292, 0.17, 0.797, 0.131, 0.046),
    12: (0.3127, 0.329, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06),
}
PNG_TRANSFERS = {SRGB_TRANSFER: 1 / 2.2, 8: 1.0}
"""Code points of a cHRM (x, y of white, red, green, blue) and of a gAMA."""
BANDS = {"RGB ": ("RGB", "RLP1Y"), "GRAY": ("L", "L1"), "CMYK": ("CMYK", "C")}
"""Of the colour space of a profile: Pillow's mode, and the first bands of pictures that it can belong to."""

RGB = tuple[int, int, int]
File = str | Path | bytes
"""A path, or a file's content."""
Media = File | Image.Image | np.ndarray
Lost = dict[str, str]


# ---- reading ------------------------------------------------------------------------------------------------------


def check_regular(path: str | Path) -> None:
    """SampleError unless it is a regular file: a FIFO may wait forever, a device may have no end."""
    if not Path(path).exists():
        raise SampleError("missing_file", f"{path} does not exist, or is a broken link: check the path")
    if not Path(path).is_file():
        raise SampleError("not_a_file", f"{path} must be a regular file; it is a folder, a device, a pipe or a socket")


def _file(source: File) -> str | io.BytesIO:
    """The input of Pillow and FFmpeg: the path of a regular file, or a file's content."""
    if isinstance(source, bytes):
        return io.BytesIO(source)
    check_regular(source)
    return str(source)


def _name(source: Media) -> str:
    return str(source) if isinstance(source, (str, Path)) else "a file in memory"


@contextlib.contextmanager
def _opened(source: Media) -> Iterator[Image.Image]:
    """A Pillow image; every error of opening or decoding becomes a SampleError."""
    try:
        if isinstance(source, Image.Image):
            yield source
        elif isinstance(source, np.ndarray):
            yield Image.fromarray(source)
        else:
            import pi_heif  # not at the top, see `open_video`

            pi_heif.register_heif_opener()
            file = _file(source)
            with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as content:
                codes = CODE_POINTS.search(content.read(HEAD_BYTES))
            with Image.open(file, formats=PICTURE_FORMATS) as image:
                if codes and (image.format == "PNG" or "icc_profile" not in image.info):
                    image.info["code_points"] = codes[1][0], codes[2][0]
                yield image
    except SampleError:
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, struct.error, EOFError, ...
        why = " ".join(str(error).split())
        if isinstance(error, Image.UnidentifiedImageError):  # its text contains an object's address
            why = "no known format"
        reason = "too_large" if isinstance(error, Image.DecompressionBombError) else "unreadable_image"
        raise SampleError(reason, f"{_name(source)} is not a readable image ({why})") from None


def _srgb(image: Image.Image, info: dict, lost: Lost) -> Image.Image:
    """The picture in the colours that `info` means: by code points, or ICC profile, or gAMA and cHRM, as in browsers.

    What does not fit is ignored.
    """
    try:
        if "code_points" in info:
            return _by_code_points(image, *info["code_points"])
        if not info.get("icc_profile"):
            if "srgb" in info or not info.keys() & {"gamma", "chromaticity"}:
                return image
            primaries = _code(PNG_PRIMARIES, info.get("chromaticity", PNG_PRIMARIES[BT709]))
            return _by_code_points(image, primaries, _code(PNG_TRANSFERS, info.get("gamma", 1 / 2.2)))
        profile = ImageCms.ImageCmsProfile(io.BytesIO(info["icc_profile"]))
        if "sRGB" in ImageCms.getProfileDescription(profile):  # most are, and a conversion takes as long as decoding
            return image
        mode, bands = BANDS[profile.profile.xcolor_space]
        if image.getbands()[0] not in bands:
            raise ValueError(f"it is for {mode}, the picture {image.mode}")
        opaque = image.convert("RGBA") if image.has_transparency_data else image
        shown = ImageCms.profileToProfile(opaque.convert(mode), profile, SRGB, outputMode="RGB")
        assert shown is not None  # None is for changes in place
        if opaque.mode == "RGBA":
            shown.putalpha(opaque.getchannel("A"))
        return shown
    except Exception as error:  # damaged bytes can raise anything
        fault = f"its colour profile is ignored, as it cannot be used ({error}); save it as sRGB"
        lost["colour_profile"] = " ".join(fault.split())
        return image


def _by_code_points(image: Image.Image, primaries: int, transfer: int) -> Image.Image:
    if not _to_srgb(primaries, transfer):
        return image
    rgba = np.array(image.convert("RGBA"))
    with _TABLES:
        table = _table(primaries, transfer)
    rgba[..., :3] = table[tuple(np.moveaxis(rgba[..., :3], -1, 0))]
    return Image.fromarray(rgba)


@lru_cache(4)
def _table(primaries: int, transfer: int) -> np.ndarray:
    """sRGB by R, G and B, uint8 [256, 256, 256, 3]: FFmpeg takes seconds for each picture of another size."""
    import av

    every = np.indices((256, 256, 256), np.uint8).reshape(3, 4096, 4096).transpose(1, 2, 0)
    frame: Any = av.VideoFrame.from_ndarray(np.ascontiguousarray(every), format="rgb24")
    frame.color_primaries = primaries
    frame.color_trc = transfer
    return frame.reformat(format="rgb24", **_to_srgb(primaries, transfer)).to_ndarray().reshape(256, 256, 256, 3)


def _code(table: Mapping[int, Any], value: Any) -> int:
    for code, known in table.items():
        if np.allclose(value, known, atol=0.02):
            return code
    raise ValueError(f"it says {value}")


def _on_ground(image: Image.Image, background: RGB) -> Image.Image:
    ground = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(ground, image.convert("RGBA"))


def _rgb(image: Image.Image, background: RGB, lost: Lost) -> np.ndarray:
    """A picture of 8 or 16 bits a channel -> upright uint8 [H, W, 3], transparency composited on `background`."""
    sixteen = image.mode.startswith("I;16")
    if image.mode.startswith(("I", "F")) and not sixteen:  # nothing says which value is white
        raise ValueError(f"it has {image.mode} pixels; save it with 8 or 16 bits a channel")
    with _LARGE if image.width * image.height > LARGE_PX else contextlib.nullcontext():
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
        info = image.info
        if sixteen:  # Pillow would clip it to 255; of other modes it gives the high byte
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        image = _srgb(image, info, lost)
        if image.has_transparency_data:
            image = _on_ground(image, background)
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def _shown(image: Image.Image) -> Iterator[Image.Image]:
    """The frames of an animation, or the picture; the poster of an APNG is for viewers that cannot animate."""
    if image.format not in ANIMATED_FORMATS:
        return iter([image])
    # frames are not counted first: a GIF that is cut would raise before its good ones
    return itertools.islice(ImageSequence.Iterator(image), int(bool(image.info.get("default_image"))), None)


def read_image(source: Media, background: RGB = WHITE) -> np.ndarray:
    """Read one picture (the first frame of an animation).

    Parameters
    ----------
    source : a file, its content, a PIL image or a uint8 array [H, W, 3].
    background : RGB under transparent pixels.

    Returns
    -------
    uint8 [1, H, W, 3], EXIF orientation applied.

    Raises
    ------
    SampleError : `missing_file`, `not_a_file`, `too_large` or `unreadable_image`.
    """
    with _opened(source) as image:
        return _rgb(next(_shown(image)), background, {})[None]


def read_still_or_animation(source: Media, background: RGB, lost: Lost) -> tuple[np.ndarray, list[float]]:
    """The frames of a picture or an animation, whatever its file name, and the seconds that each is shown.

    Of an animation that is cut, the frames before the cut are read.
    """
    durations_s = []

    def frames_of(image: Image.Image) -> Iterator[np.ndarray]:
        try:
            for frame in _shown(image):
                yield _rgb(frame, background, lost)  # decoding finds the duration
                duration_ms = frame.info.get("duration") or 0
                durations_s.append((duration_ms if duration_ms > 10 else 100) / 1000)  # as in browsers
        except Exception as error:  # of Pillow's decoders, see `_opened`
            if not durations_s:
                raise
            lost["cut_short"] = f"it is damaged after frame {len(durations_s)} ({error}), and the rest is not used"

    with _opened(source) as image:
        if image.format == "TIFF":  # of other formats the number of frames takes decoding
            pages = getattr(image, "n_frames", 1)
            if pages > 1:
                lost["pages"] = f"the first of its {pages} pages is used; save each as a file of its own"
        return np.stack(list(bounded(frames_of(image), _name(source)))), durations_s


def bounded(frames: Iterable[np.ndarray], name: object, held: int | None = None) -> Iterator[np.ndarray]:
    """The frames; SampleError `too_long` if all of them, or as many as are `held` at once, are over `MAX_BYTES`."""
    for count, frame in enumerate(frames, 1):
        if min(count, held or count) * frame.nbytes > MAX_BYTES:
            fix = "cut it, or pass a smaller --clip-frames"
            raise SampleError("too_long", f"{name} decodes to more than {MAX_BYTES >> 20} MiB; {fix}")
        yield frame


@contextlib.contextmanager
def _readable(name: object) -> Iterator[None]:
    """FFmpeg's errors of opening or decoding become SampleErrors."""
    import av  # not at the top: commands that show pictures alone start faster

    try:
        yield
    except (av.error.FFmpegError, OSError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise SampleError("unreadable_video", f"{name} is not a readable video ({reason})") from None


_COUNTS = re.compile(rb"stsz.{8}(.{4})|trun.{4}(.{4})", re.DOTALL)
"""In an mp4's index and in its fragments: after version, flags and a constant size, the number of samples."""


def _check_samples(source: File) -> None:
    """SampleError for an mp4 that names more samples than it has bytes: FFmpeg allocates 60 bytes for each at once."""
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        samples = 0
        start = 0
        length = 8
        while length >= 8 and start + length <= size:  # boxes of [length, name, content]; another format's end at once
            file.seek(start)
            head = file.read(16)
            is_64_bit = head[:4] == b"\0\0\0\1"
            length = int.from_bytes(head[8:] if is_64_bit else head[:4]) or size - start  # 0: to the end
            if head[4:8] != b"mdat":  # the pictures, where these names mean nothing
                for counts in _COUNTS.finditer(file.read(min(length, MOST_HEADER))):
                    samples += int.from_bytes(counts[1] or counts[2])
            start += length
    if samples > size:
        raise SampleError("too_large", f"{_name(source)} names {samples} samples in {size} bytes; write it again")


def _container(source: File) -> Any:
    """FFmpeg's view of a file, to be closed."""
    import av

    with _readable(_name(source)):
        # tags are often in the encoding of the machine that wrote them
        file = _file(source)
        _check_samples(source)
        return av.open(file, options=VIDEO_FORMATS, metadata_errors="replace")


@contextlib.contextmanager
def open_video(
    source: File, fps: float | None = None, lost: Lost | None = None, background: RGB = WHITE
) -> Iterator[tuple[Iterator[np.ndarray], float]]:
    """Stream a video's best video stream, so no cover: `with open_video(path) as (frames, rate):`.

    Parameters
    ----------
    fps : frames per second of the result (the frame shown at each instant); None keeps every stored frame.
    background : RGB under transparent pixels.

    Yields
    ------
    frames : iterator of uint8 [H, W, 3], all of the first one's size, turned and mirrored as players show them, pixels
        made square. HDR becomes sRGB with its reference white (203 cd/m2) as white; what is brighter is clipped.
    rate : frames per second of `frames`.

    Raises
    ------
    SampleError : `missing_file`, `not_a_file` or `unreadable_video`, on opening and while iterating over `frames`.
    """
    name = _name(source)
    with _container(source) as container:
        stream: Any = container.streams.best("video")
        if stream is None:
            raise SampleError("unreadable_video", f"{name} has no video stream")
        stream.thread_type = "AUTO"
        rate = float(stream.average_rate or stream.guessed_rate or 25)
        lost = {} if lost is None else lost
        timed = _decoded(name, container, stream, rate, lost, background)
        if fps:
            yield held(timed, rate, fps, name), fps
        else:
            yield evenly(timed, rate, lost), rate


def read_video(path: str | Path, fps: float | None = None) -> tuple[np.ndarray, float]:
    """All frames of a video, uint8 [T, H, W, 3], and their rate; as `open_video`, and `too_long` over `MAX_BYTES`."""
    with open_video(path, fps) as (frames, rate):
        return np.stack(list(bounded(frames, path))), rate


def _decoded(name: object, container: Any, stream: Any, rate: float, lost: Lost, background: RGB) -> Iterator:
    """(seconds since the first frame, uint8 [H, W, 3]) of each frame."""
    import av

    first = None
    start = 0.0
    frames = container.decode(stream)
    converter = av.video.reformatter.VideoReformatter()  # one of each frame's own would build its tables again
    if "alpha_mode" in map(str.lower, stream.metadata) and stream.codec.name in ALPHA_DECODERS:
        decoder: Any = av.CodecContext.create(ALPHA_DECODERS[stream.codec.name], "r")
        frames = itertools.chain.from_iterable(map(decoder.decode, container.demux(stream)))
    # AVI has decoding times alone, which differ from display times with B-frames; frames come in display order
    untimed = container.format.name == "avi" and stream.codec_context.has_b_frames
    with _readable(name):
        for i, frame in enumerate(frames):
            time = i / rate if untimed or frame.time is None else frame.time
            if first is None:
                first = frame
                start = time
                aspect = stream.sample_aspect_ratio or 1
                height = frame.height
                width = max(1, round(frame.width * aspect))
                if not 1 <= MAX_ASPECT * aspect <= MAX_ASPECT**2 or 3 * width * height > MAX_BYTES:
                    shape = f"pixels of {aspect}:1 and frames of {width}x{height} px"
                    raise SampleError("too_large", f"{name} has {shape}; scale it down, with square pixels")
            # streams of calls change their size and keep its aspect: those frames are scaled, as players do
            if abs(frame.width * first.height / (frame.height * first.width) - 1) > SAME_ASPECT:
                change = f"{first.width}x{first.height} to {frame.width}x{frame.height} px at {time - start:.1f} s"
                raise SampleError("unreadable_video", f"{name}: its frames change from {change}; cut it there")
            if frame.interlaced_frame:
                lost["interlaced"] = "it is interlaced; convert it: ffmpeg -i IN -vf bwdif=send_frame OUT.mp4"
            opaque = not any(component.is_alpha for component in frame.format.components)
            pixels = "rgb24" if opaque else "rgba"
            rgb = converter.reformat(frame, width, height, pixels, **_colours(frame)).to_ndarray()
            if not opaque:
                rgb = np.asarray(_on_ground(Image.fromarray(rgb), background).convert("RGB"))
            yield time - start, _turned(rgb, first)
    if first is None:
        raise SampleError("unreadable_video", f"{name} has no frames that can be decoded")
    length = 0.0
    if stream.duration:
        length = float(stream.duration * stream.time_base)
    elif len(container.streams) == 1 and container.duration:  # else it may be that of the sound
        length = container.duration / av.time_base
    if container.format.name.startswith(SAY_THEIR_END):
        length -= start
    end = time - start + float((frame.duration or 0) * (frame.time_base or 0) or 1 / rate)
    if container.format.name.startswith(SAY_THEIR_LENGTH) and length - end > max(2 / rate, 0.1 * length):
        fault = f"its frames end at {end:.1f} s, and it should have {length:.1f} s; copy it again"
        raise SampleError("unreadable_video", f"{name}: {fault}")


def evenly(timed: Iterable, rate: float, lost: Lost) -> Iterator[np.ndarray]:
    """Every frame of (seconds, frame), as if shown at 0, 1/rate, 2/rate, ...; `lost` says where their times differ."""
    for i, (time, frame) in enumerate(timed):
        if abs(time - i / rate) > max(2 / rate, 0.05 * time):
            fault = f"its frames are not evenly spaced, and the one of {time:.2f} s is used at {i / rate:.2f} s"
            lost.setdefault("uneven_frames", f"{fault}; keep their times: --fps")
        yield frame


def _colours(frame: Any) -> dict[str, int]:
    """What `reformat` needs to give the sRGB of a frame: players guess what its file does not say."""
    colours = _to_srgb(frame.color_primaries, frame.color_trc)
    if frame.colorspace == UNSPECIFIED and frame.height >= HD_HEIGHT_PX:
        colours["src_colorspace"] = BT709
    return colours


def _to_srgb(primaries: int, transfer: int) -> dict[str, int]:
    """The same for a frame of RGB; what differs little from sRGB is not converted, as players do."""
    if transfer in OTHER_TRANSFERS:
        return {"dst_color_primaries": BT709, "dst_color_trc": SRGB_TRANSFER}
    return {"dst_color_primaries": BT709} if primaries in WIDE_PRIMARIES else {}


def _turned(rgb: np.ndarray, frame: Any) -> np.ndarray:
    """A picture as the display matrix of a frame says: in quarter turns, mirrored or not.

    The matrix [a b u; c d v; x y w], 3 x 3 integers, puts (column, row) at (a column + c row, b column + d row).
    """
    try:
        matrix = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV 18 refuses kinds of side data that it does not know, but still gives the angle
        return np.rot90(rgb, k=round(frame.rotation / 90) % 4)
    if matrix is None:
        return rgb
    a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5].tolist()
    if abs(b) > abs(a):  # columns become rows
        rgb = rgb.swapaxes(0, 1)
        a = c
        d = b
    return rgb[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def held(timed: Iterable, rate: float, fps: float, name: object) -> Iterator[np.ndarray]:
    """The frame on screen at 0, 1/fps, 2/fps, ... of (seconds, frame); the last one stays for 1 / `rate`.

    For frames at 0, 0.1 and 0.2 s with rate 10, 20 fps shows each twice, and 5 fps the first and the third.

    Raises
    ------
    SampleError : `too_long`, for more than `FRAMES_PER_STORED` frames per frame read so far.
    """
    shown = None
    given = 0
    end = 0.0
    for stored, (time, frame) in enumerate(itertools.chain(timed, [(math.inf, None)])):
        until = end + 1 / rate if frame is None else time
        while shown is not None and given / fps < until - 1e-4:  # times are rounded to a container's ticks
            if given >= FRAMES_PER_STORED * stored:
                fault = f"a frame of {name} stays for {until - end:.1f} s, so that {fps:g} fps need more than"
                raise SampleError("too_long", f"{fault} {FRAMES_PER_STORED} for each stored one; lower --fps or cut it")
            yield shown
            given += 1
        shown = frame
        end = time


# ---- sizes --------------------------------------------------------------------------------------------------------


PLACES = {
    "crop": (0.5, 0.5),
    "crop-top": (0.5, 0),
    "crop-bottom": (0.5, 1),
    "crop-left": (0, 0.5),
    "crop-right": (1, 0.5),
    "pad": (0.5, 0.5),
}
"""The part that `resize` keeps: the middle, or from which edge; (x, y) of Pillow's `ImageOps.fit`."""


def fit_size(height: int, width: int, short_side: int, upscale: bool) -> tuple[int, int]:
    """The resized picture's size in px: the short side is `short_side`, both sides are the nearest multiples of 16.

    A picture smaller than that keeps its size (to the nearest multiples) unless `upscale`.

    Raises
    ------
    SampleError : `extreme_aspect` if one side is more than 8 times the other, `too_small` under 16 px.
    """
    short, long = sorted((height, width))
    if short < 1 or long > MAX_ASPECT * short:
        raise SampleError("extreme_aspect", f"{height}x{width} px is longer than {MAX_ASPECT:g}:1; crop it first")
    if short < SIDE_MULTIPLE:
        raise SampleError("too_small", f"{height}x{width} px: both sides must be at least {SIDE_MULTIPLE} px")
    scale = Fraction(short_side, short) if upscale or short > short_side else Fraction(1)

    def multiple(side: int) -> int:
        # of two as near, the larger: nothing is scaled away
        return int(side * scale + SIDE_MULTIPLE // 2) // SIDE_MULTIPLE * SIDE_MULTIPLE

    return multiple(height), multiple(width)


def cropped_share(height: int, width: int, size: tuple[int, int]) -> float:
    """The share of a picture's area that `resize` to (height, width) = `size` cuts off."""
    scales = size[0] / height, size[1] / width
    return 1 - min(scales) / max(scales)


def resize(video: np.ndarray, height: int, width: int, fit: str = "crop") -> np.ndarray:
    """Crop to the aspect of `height` x `width`, or pad to it, and resample once with Lanczos; uint8 [T, H, W, 3].

    Parameters
    ----------
    fit : one of `PLACES`; pad: the whole picture in the middle, its outermost pixels repeated around it.
    """
    size = (width, height)
    if fit == "pad":
        scale = min(height / video.shape[1], width / video.shape[2])
        size = max(1, round(video.shape[2] * scale)), max(1, round(video.shape[1] * scale))
    fitted = []
    for frame in video:
        image = ImageOps.fit(Image.fromarray(frame), size, Image.Resampling.LANCZOS, centering=PLACES[fit])
        fitted.append(np.asarray(image))
    if fit != "pad":
        return np.stack(fitted)
    right = width - size[0]
    below = height - size[1]
    around = (0, 0), (below // 2, (below + 1) // 2), (right // 2, (right + 1) // 2), (0, 0)
    return np.pad(fitted, around, mode="edge")


# ---- writing ------------------------------------------------------------------------------------------------------


def write_mp4(path: str | Path, video: np.ndarray, fps: float, crf: int = 18, comment: str = "") -> None:
    """Write H.264 (yuv420p, BT.709) that browsers play at once; odd sides gain one repeated row or column.

    Parameters
    ----------
    video : uint8 [T, H, W, 3].
    crf : x264's constant rate factor, 0 (lossless luma) to 51. comment : text stored in the file, see `read_comment`.
    """
    import av

    _, h, w, _ = video.shape
    video = np.pad(video, ((0, 0), (0, h % 2), (0, w % 2), (0, 0)), mode="edge")  # halved colour planes: no odd sides
    with av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"}) as container:
        container.metadata["comment"] = comment
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = video.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": str(crf), "preset": "medium"}
        context = stream.codec_context
        context.colorspace = BT709
        context.color_primaries = BT709
        context.color_trc = BT709
        context.color_range = LIMITED_RANGE
        for array in video:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=BT709, dst_color_range=LIMITED_RANGE)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def write_png(path: str | Path, image: np.ndarray) -> None:
    """Write uint8 [H, W, 3 or 4], with our mark."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, _png(image, MARK))


def _png(image: np.ndarray, comment: str) -> bytes:
    out = io.BytesIO()
    notes = PngImagePlugin.PngInfo()
    if comment:
        notes.add_itxt("Comment", comment)
    # 6, the default level, takes twice as long for 9 % less
    Image.fromarray(image).save(out, format="PNG", compress_level=3, pnginfo=notes)
    return out.getvalue()


def read_comment(path: str | Path) -> str:
    """The text stored in a PNG or MP4; "" for none.

    Raises
    ------
    SampleError : as of `read_image` and `open_video`.
    """
    if Path(path).suffix.lower() == ".png":
        with _opened(path) as image:
            return str(image.info.get("Comment", ""))
    with _container(path) as container:
        return container.metadata.get("comment", "")


def compressed(frames: np.ndarray, fps: float, comment: str = "") -> tuple[str, bytes]:
    """(media type, bytes) of uint8 [T, H, W, 3]: the MP4 of `write_mp4`, or a PNG for one frame.

    comment : text stored inside, see `read_comment`.
    """
    if len(frames) == 1:
        return "image/png", _png(frames[0], comment)
    with tempfile.TemporaryDirectory(prefix="dfm-") as folder:
        path = Path(folder, "clip.mp4")
        write_mp4(path, frames, fps, comment=comment)
        return "video/mp4", path.read_bytes()
