"""`folder:DIR`: images, animations and videos of a folder (and below), with captions from files beside them or from their names.

Images: png, jpg, jpeg, webp, bmp, tif. Clips: mp4, webm, mov, mkv, animated gif and webp. The caption of `a.png` is looked for in this order:
`captions.csv` (columns file and caption), `a.txt`, `a.json` (its "caption" or "text"), the file's name with - and _ as spaces.
Guarantees: files in sorted order; a file that cannot be used is a `SampleError` that names it. Transparent pixels lie on `background`.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dfm_nb import video
from dfm_nb.records import Clip, SampleError

IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
ANIMATED = {".gif", ".webp"}
VIDEOS = {".mp4", ".webm", ".mov", ".mkv", ".avi"}
CAPTIONS = "captions.csv"


def key_of(relative: str) -> str:
    """A WebDataset key from a path: its legible part, and a hash that keeps different paths apart."""
    legible = re.sub(r"[^A-Za-z0-9_-]+", "_", str(Path(relative).with_suffix("")))[-60:].strip("_") or "item"
    return f"{legible}-{hashlib.sha256(relative.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"


def cut_clips(frames: np.ndarray, clip_frames: int | None, stride: int | None) -> list[np.ndarray]:
    """Windows of `clip_frames` (1 + 4k) frames every `stride`; without `clip_frames` the whole, cut to 1 + 4k.

    A video shorter than `clip_frames` gives one clip of what it has.
    """
    length = len(frames)
    if clip_frames is None or length <= clip_frames:
        return [frames[: 1 + (length - 1) // 4 * 4]]
    return [frames[s : s + clip_frames] for s in range(0, length - clip_frames + 1, stride or clip_frames)]


def check_clip_options(clip_frames: int | None, fps: float | None, stride: int | None) -> None:
    if clip_frames is not None and (clip_frames < 1 or (clip_frames - 1) % 4):
        low = max(0, (clip_frames - 1) // 4) * 4 + 1
        raise ValueError(f"--clip-frames must be 1 + 4k; got {clip_frames}; use {low} or {low + 4}")
    if fps is not None and fps <= 0:
        raise ValueError(f"--fps must be positive; got {fps}")
    if stride is not None and stride < 1:
        raise ValueError(f"--stride must be at least 1 frame; got {stride}")


def read_media(path: Path, background, fps: float | None) -> tuple[np.ndarray, float]:
    """Frames and rate of an image (one frame), animation or video file."""
    suffix = path.suffix.lower()
    if suffix in VIDEOS:
        return video.read_video(path, fps)
    if suffix in ANIMATED:
        frames, native = video.read_animation(path, background)
        if len(frames) > 1:
            return resample(frames, native, fps)
        return frames, 1.0
    return video.read_image(path, background), 1.0


def resample(frames: np.ndarray, native: float, fps: float | None) -> tuple[np.ndarray, float]:
    """Nearest source frame for each moment at the asked rate."""
    if fps is None:
        return frames, native
    count = max(1, round(len(frames) / native * fps))
    index = np.minimum((np.arange(count) * native / fps).round().astype(int), len(frames) - 1)
    return frames[index], fps


class Folder:
    """Items are files; a video gives one or more clips."""

    name = "folder"

    def __init__(self, root: Path, background, clip_frames, fps, stride):
        self.root, self.background = root, background
        self.clip_frames, self.fps, self.stride = clip_frames, fps, stride
        self.files = sorted(
            p for p in root.rglob("*") if p.is_file() and p.suffix.lower() in IMAGES | ANIMATED | VIDEOS and p.name[0] != "."
        )
        self.captions = self._read_csv(root / CAPTIONS)

    @staticmethod
    def _read_csv(path: Path) -> dict[str, str]:
        if not path.is_file():
            return {}
        try:
            with path.open(encoding="utf-8-sig", newline="") as f:
                rows = list(csv.DictReader(f))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8; byte {error.start} is not; save it as UTF-8") from None
        columns = set(rows[0]) if rows else {"file", "caption"}
        file_column = next((c for c in ("file", "file_name", "filename", "image") if c in columns), None)
        if file_column is None or "caption" not in columns:
            raise ValueError(f"{path} must have the columns file and caption; it has {', '.join(map(str, sorted(columns, key=str)))}")
        return {row[file_column]: row["caption"] for row in rows if row["caption"]}

    def __len__(self) -> int:
        return len(self.files)

    def _relative(self, index: int) -> str:
        return self.files[index].relative_to(self.root).as_posix()

    def item_key(self, index: int) -> str:
        return key_of(self._relative(index))

    def identity(self) -> dict:
        listing = hashlib.sha256()
        for p in self.files:
            listing.update(f"{p.relative_to(self.root).as_posix()} {p.stat().st_size}\n".encode("utf-8", "surrogateescape"))
        return {
            "name": self.name, "folder": self.root.name, "files": len(self.files), "listing_sha256": listing.hexdigest(),
            "background": list(self.background), "clip_frames": self.clip_frames, "fps": self.fps, "stride": self.stride,
        }  # fmt: skip

    def caption(self, index: int) -> str:
        path = self.files[index]
        for name in (self._relative(index), path.name):
            if name in self.captions:
                return self.captions[name].strip()
        for suffix in (".txt", ".json"):
            beside = path.with_suffix(suffix)
            if beside.is_file():
                return self._caption_file(beside)
        words = re.sub(r"[_\-.]+", " ", path.stem).strip()
        if not words:
            raise SampleError("no_caption", f"{path} has no caption and no name to make one from; write {path.stem}.txt")
        return words

    @staticmethod
    def _caption_file(path: Path) -> str:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise SampleError("caption_not_utf8", f"{path} must be UTF-8; byte {error.start} is not; save it as UTF-8") from None
        if path.suffix == ".json":
            try:
                record = json.loads(text)
            except ValueError as error:
                raise SampleError("caption_not_json", f"{path} is not JSON: {error}") from None
            text = record if isinstance(record, str) else record.get("caption") or record.get("text") or ""
            if not isinstance(text, str):
                raise SampleError("no_caption", f'{path}: its "caption" must be a string')
        if not text.strip():
            raise SampleError("no_caption", f"{path} is empty; write a caption in it or remove it to use the file's name")
        return text.strip()

    def read(self, index: int) -> Iterator[Clip]:
        path, caption = self.files[index], self.caption(index)
        frames, fps = read_media(path, self.background, self.fps)
        key = self.item_key(index)
        clips = cut_clips(frames, self.clip_frames, self.stride)
        for n, part in enumerate(clips):
            yield Clip(key if len(clips) == 1 else f"{key}-{n:04d}", part, caption, fps, self.name)


def build(
    spec: str | None = None, background: str = "white", clip_frames: int | None = None, fps: float | None = None,
    stride: int | None = None,
) -> Folder:  # fmt: skip
    """The source of `folder:DIR`; ValueError or NotADirectoryError says what is wrong with it."""
    if not spec:
        raise ValueError("name the folder: --source folder:DIR")
    root = Path(spec).expanduser()
    if not root.is_dir():
        raise NotADirectoryError(f"--source folder:{spec} is not a folder; name one with images or videos")
    check_clip_options(clip_frames, fps, stride)
    source = Folder(root, video.parse_colour(background), clip_frames, fps, stride)
    if not len(source):
        kinds = ", ".join(sorted(s[1:] for s in IMAGES | ANIMATED | VIDEOS))
        raise ValueError(f"{root} has no images or videos ({kinds}); name a folder that has some")
    return source
