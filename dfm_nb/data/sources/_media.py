"""From a media file to clips: what `folder` and `table` share.

A picture or animation gives one clip, a video any number. Lengths are 1 + 4k frames. A video is cut while it is
decoded, so memory holds one clip and not the video. Frames that `fps` skips are decoded too.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import ImageColor
from pydantic import model_validator

from dfm_nb.base import geometry, video
from dfm_nb.base.limits import MAX_BYTES
from dfm_nb.base.options import Count, Options, option
from dfm_nb.base.records import SampleError

IMAGE_SUFFIXES = frozenset(".png .apng .jpg .jpeg .jfif .webp .gif .avif .heic .heif .jp2 .bmp .tif .tiff".split())
VIDEO_SUFFIXES = frozenset(
    ".mp4 .m4v .webm .mov .mkv .avi .mpg .mpeg .vob .ts .mts .m2ts .wmv .asf .flv .3gp .3g2 .ogv".split()
)
MEDIA_SUFFIXES = IMAGE_SUFFIXES | VIDEO_SUFFIXES
UNREAD = {
    "magick IN OUT.png": ".jxl .psd .xcf .tga .exr .ico .ppm .svg .dng .cr2 .cr3 .nef .arw .raf .orf .rw2".split(),
    "ffmpeg -i IN OUT.mp4": ".rm .rmvb .mxf .dv .divx .f4v .y4m .h264 .264 .hevc .265".split(),
}
"""Pictures and videos that are not read, by the command that converts them."""
HEIF_BRANDS = b"avif avis mif1 mif2 msf1 heic heix heim heis hevc hevx".split()
STILL_FPS = 1.0  # of every still, also of one that is a frame of a video
Clips = Iterator[tuple[str, np.ndarray, float, video.Lost]]
"""For each clip: key, frames uint8 [T, H, W, 3], frames per second, and what is lost of its file."""
Beside = Callable[[float], tuple[list[np.ndarray], video.Lost]]


class MediaOptions(Options):
    """How media files are read; flags of the sources that read such files.

    The author of a folder or a fetched table must not choose which other files of this machine go into the data:
    `allow_outside` also reads files outside the folder, and fetches from this machine's network.
    """

    background: str = option("white", "colour behind transparent images and videos: a name or #rrggbb")
    clip_frames: Count | None = option(None, "videos: frames per clip, 1 + 4k; default: one clip of the whole video")
    fps: float | None = option(None, "videos: frames per second to sample; default: every frame", gt=0)
    stride: Count | None = option(
        None, "videos: frames from one clip's start to the next; default: --clip-frames, no overlap"
    )
    allow_outside: bool = option(False, "also read files outside the folder, by a link or captions.csv")

    @model_validator(mode="after")
    def _fits_together(self) -> MediaOptions:
        n = self.clip_frames
        if n is not None and not geometry.is_frame_count(n):
            raise ValueError(f"--clip-frames must be 1 + 4k; got {n}; use {geometry.nearest_frames(n)}")
        if self.stride is not None and n is None:
            raise ValueError(f"--stride {self.stride} needs --clip-frames")
        self.identity()  # ValueError for an unknown colour
        return self

    @property
    def colour(self) -> video.RGB:
        return ImageColor.getrgb(self.background)[:3]

    def identity(self) -> dict:
        """The options that affect pixels."""
        cut = {"clip_frames": self.clip_frames, "fps": self.fps, "stride": self.stride}
        return {"background": list(self.colour), **cut}

    def inside(self, path: Path, folder: Path) -> Path:
        """The path; SampleError if it leaves the folder (by `..`, an absolute path or a link)."""
        if not self.allow_outside and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
            said = f"{path} is outside {folder}; move it, or trust its author with --allow-outside"
            raise SampleError("outside", said)
        return path

    def clips(self, source: video.Media, key: str) -> Clips:
        """Yield the clips of one item.

        Parameters
        ----------
        source : a file, a video when its name ends like one; a picture, or the content of a file.
        key : of the item; clips cut out of a longer one are `<key>-0000`, `<key>-0001`, ...

        Raises
        ------
        SampleError : when the file cannot be used; clips before the fault may already have been given.
        """
        name = source if isinstance(source, Path) else key
        lost = video.Lost()
        if isinstance(source, (Path, bytes)) and _is_video(source):
            with video.open_video(source, self.fps, lost, self.colour) as (frames, fps):
                yield from self._cut(frames, fps, key, name, lost)
            return
        stills, durations_s = video.read_still_or_animation(source, self.colour, lost)
        if len(stills) == 1:
            yield key, stills, STILL_FPS, lost
            return
        fps = self.fps or len(stills) / sum(durations_s)
        timed = zip(itertools.accumulate(durations_s, initial=0.0), stills)
        last = 1 / durations_s[-1]
        frames = video.held(timed, last, fps, name) if self.fps else video.evenly(timed, fps, lost)
        yield from self._cut(frames, fps, key, name, lost)

    def beside(self, given: Iterable[video.Media], key: str) -> Beside:
        """What is given with the next clip of an item, by the clip's rate: frames, and what does not fit.

        A picture is given with each clip; of a video, the clip that was cut at the same place: videos are read
        together, so that memory holds one clip of each.

        Raises
        ------
        SampleError : as `clips` does, a given video has no clip there, or `too_large` over `MAX_BYTES` in all.
        """
        every = [self._lasting(one, key) for one in given]

        def of(fps: float) -> tuple[list[np.ndarray], video.Lost]:
            chosen = []
            lost = video.Lost()
            for clips in every:
                clip = next(clips, None)
                if clip is None:
                    raise SampleError("given_too_short", f"{key} has more clips than its given video; cut it")
                name, frames, rate, faults = clip
                lost |= faults
                if (name != key or len(frames) > 1) and abs(rate - fps) > 0.01 * fps:
                    said = f"the given video has {rate:g} frames a second and its clip {fps:g}; pass --fps"
                    lost["given_other_rate"] = said
                chosen.append(frames)
                if sum(one.nbytes for one in chosen) > MAX_BYTES:
                    said = f"what is given with {key} decodes to more than {MAX_BYTES >> 20} MiB; scale it down"
                    raise SampleError("too_large", said)
            return chosen, lost

        return of

    def _lasting(self, one: video.Media, key: str) -> Clips:
        """The clips of what is given; a picture again and again."""
        clip = None
        for clip in self.clips(one, key):
            yield clip
        if clip and clip[0] == key and len(clip[1]) == 1:
            yield from itertools.repeat(clip)

    def _cut(self, frames: Iterator[np.ndarray], fps: float, key: str, name: object, lost: video.Lost) -> Clips:
        """Windows of `clip_frames` every `stride`; the rest after the last whole window is not used.

        What is shorter than one window, or ends in a fault before, gives one clip, cut to 1 + 4k frames. Of 12 frames,
        5 every 3 are 0-4, 3-7 and 6-10; 13 every 3 are 0-8.
        """
        length = self.clip_frames
        given = 0
        window: deque[np.ndarray] = deque(maxlen=length)
        try:
            for count, frame in enumerate(video.bounded(frames, name, length), 1):
                window.append(frame)
                if length and count >= length and (count - length) % (self.stride or length) == 0:
                    rate = fps if length > 1 else STILL_FPS
                    yield f"{key}-{given:04d}", np.stack(window), rate, lost | repeats(window, fps)
                    given += 1
        except SampleError as error:
            if given or not window or error.reason == "too_long":
                raise
            lost["cut_short"] = f"the rest after frame {len(window)} is not used: {error.detail}"
        if given:
            return
        kept = geometry.floor_frames(len(window))
        if kept == 1 or length:
            least = f"--clip-frames {length}" if length else "5, so it is a still"
            said = f"{len(window)} frames at {fps:g} fps are fewer than {least}; {kept} are used"
            fix = "; raise --fps or leave it out, or lower --clip-frames" if self.fps or length else ""
            lost["short_clip"] = said + fix
        elif kept < 0.95 * len(window):
            lost["cut_over_5%"] = f"{kept} of {len(window)} frames are used, as a clip has 1 + 4k"
        used = list(window)[:kept]
        yield key, np.stack(used), fps if kept > 1 else STILL_FPS, lost | repeats(used, fps)


def repeats(frames: Iterable[np.ndarray], fps: float) -> video.Lost:
    """A loss if `--fps` repeats more than a quarter of a clip's frames; 8 fps sampled at 12 repeats a third."""
    # `video.held` gives the same frame once more
    again = [a is b for a, b in itertools.pairwise(frames)]
    if 4 * sum(again) <= len(again):
        return {}
    said = f"{sum(again)} of {len(again) + 1} frames at {fps:g} fps repeat the one before, as the file has fewer"
    return {"repeated_frames": f"{said}; lower --fps or leave it out"}


def _is_video(source: Path | bytes) -> bool:
    """Whether a file's name, or the first bytes of its content, are a video's; else it should be a picture."""
    if isinstance(source, Path):
        return source.suffix.lower() in VIDEO_SUFFIXES
    boxes = source[4:8] == b"ftyp" and source[8:12] not in HEIF_BRANDS
    # QuickTime older than ftyp
    boxes = boxes or source[4:8] in (b"moov", b"mdat", b"wide", b"free", b"skip")
    # Matroska and WebM, MPEG as a program and as a bare stream, ASF (WMV), Ogg, FLV
    starts = b"\x1aE\xdf\xa3", b"\x00\x00\x01\xba", b"\x00\x00\x01\xb3", b"\x30\x26\xb2\x75", b"OggS", b"FLV"
    # MPEG-TS has packets of 188 bytes, M2TS has a time before each
    transport = source[:1] == source[188:189] == b"G" or source[4:5] == source[196:197] == b"G"
    return boxes or transport or source.startswith(starts) or (source[:4] == b"RIFF" and source[8:12] == b"AVI ")


def key_of(name: str) -> str:
    """A WebDataset key from a path: its legible part, and a hash that keeps different paths apart."""
    # macOS lists letters and accents apart
    composed = unicodedata.normalize("NFC", str(Path(name).with_suffix("")))
    legible = re.sub(r"[^\w-]+", "_", composed)[-60:].strip("_") or "item"
    return f"{legible}-{hashlib.sha256(name.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


def listing_sha256(items: Iterable[object]) -> str:
    """A hash of what a source lists."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(f"{item!r}\n".encode())
    return digest.hexdigest()
