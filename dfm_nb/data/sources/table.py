"""`table:FILE`: rows of a CSV, TSV, JSONL or parquet file, each with a caption and an image or a video.

The table is a local path, `hf://datasets/...` or an http(s) URL. The media column holds image bytes (raw, or the hub's
struct of bytes and path), a path (absolute, or relative to the table), a file:// URL or an http(s) URL. Of several such
columns (`image`, `image_url`, ...) each row uses the first that is not empty. Nothing that is fetched is kept on disk.
A table that you name may hold any path; one that is fetched only paths below the working directory, unless
`allow_outside`. From Python the table may be a DataFrame, whose media column may also hold PIL images and uint8 arrays.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from PIL import Image

from dfm_nb.base import video
from dfm_nb.base.plugins import Flag
from dfm_nb.base.records import Clip, SampleError
from dfm_nb.data.sources import _fetch
from dfm_nb.data.sources._media import MEDIA_FLAGS, VIDEO_SUFFIXES, MediaOptions, key_of
from dfm_nb.data.sources._rows import Rows, frame_rows, holds_pictures, open_rows

if TYPE_CHECKING:
    import pandas as pd

COLUMN_FLAGS = (
    Flag("image_column", "table: column with image bytes, paths or URLs"),
    Flag("caption_column", "table: column with captions"),
)
FLAGS = (*COLUMN_FLAGS, *MEDIA_FLAGS)
MEDIA_COLUMNS = "image video image_path video_path path file file_name filename image_url video_url url".split()
CAPTION_COLUMNS = ("caption", "text", "prompt", "name")
FETCHED = ("hf://", "http://", "https://")


@dataclass
class Table:
    """Items are rows.

    label : the table's name in keys, messages and the identity.
    folder : what relative paths in the table refer to.
    media : columns with images or videos, in order of preference.
    reading : with `allow_outside`, local paths may leave `folder`.
    """

    name: str
    rows: Rows
    label: str
    folder: Path
    media: Sequence[str]
    caption_column: str
    reading: MediaOptions
    limits: _fetch.Limits

    def __len__(self) -> int:
        return len(self.rows[self.caption_column])

    def item_key(self, index: int) -> str:
        return f"{key_of(Path(self.label).name)}-{index:07d}"

    def identity(self) -> dict:
        """The captions and the paths and URLs are hashed, pictures inside the table are not."""
        listing = hashlib.sha256()
        _update(listing, "[", self.rows[self.caption_column], "]")
        for column in self.media:
            if not holds_pictures(self.rows[column]):
                _update(listing, f"({column!r}, [", self.rows[column], "])")
        return {
            "name": self.name,
            "table": self.label,
            "rows": len(self),
            "media_columns": list(self.media),
            "caption_column": self.caption_column,
            "listing_sha256": listing.hexdigest(),
            **self.reading.identity(),
        }

    def read(self, index: int) -> Iterator[Clip]:
        where = f"row {index + 1} of {self.label}"
        caption = self._caption(index, where)
        values = (self.rows[column][index] for column in self.media)
        # the hub's struct of bytes and path is its bytes, or its path when it has none
        plain = ((v.get("bytes") or v.get("path") or None) if isinstance(v, dict) else v for v in values)
        value = next((v for v in plain if v is not None), None)
        if value is None:
            raise SampleError("no_media", f"{where} has neither bytes, a path nor a URL in {' or '.join(self.media)}")
        try:
            with self._local(value) as media:
                for key, frames, fps in self.reading.clips(media, self.item_key(index)):
                    yield Clip(key, frames, caption, fps, self.name)
        except SampleError as error:
            raise SampleError(error.reason, f"{where}: {error.detail}") from None

    def _caption(self, index: int, where: str) -> str:
        value = self.rows[self.caption_column][index]
        if value is None:
            raise SampleError("no_caption", f"{where} has an empty {self.caption_column!r}; write a caption there")
        if not isinstance(value, (str, int, float)):
            kind = type(value).__name__
            raise SampleError("no_caption", f"{where}: {self.caption_column!r} must be text; it is a {kind}")
        return str(value).strip()

    @contextmanager
    def _local(self, value: Any) -> Iterator[Path | bytes | Image.Image]:
        """The value as a picture, its bytes or a file; temporary files go when the block ends."""
        if isinstance(value, (bytearray, memoryview)):
            value = bytes(value)
        if hasattr(value, "__array_interface__"):
            yield video.picture(value)
        elif not isinstance(value, bytes):
            yield from self._file(str(value).strip())
        elif _is_video(value):
            with _temporary(".mp4") as path:
                path.write_bytes(value)
                yield path
        else:
            yield value

    def _file(self, text: str) -> Iterator[Path]:
        """The file of a path or URL."""
        parts = urlsplit(text if "://" in text else "")
        if parts.scheme in ("", "file"):
            path = Path(url2pathname(parts.path) if parts.scheme else text).expanduser()
            yield self.reading.inside(self.folder / path, self.folder)
            return
        if parts.scheme not in ("http", "https"):
            raise SampleError("bad_url", f"{text} must be a path or a file, http or https URL; got {parts.scheme}")
        with _temporary(".download") as path:
            kind = _fetch.download(text, path, self.limits)
            if Path(unquote(parts.path)).suffix.lower() in VIDEO_SUFFIXES or kind.startswith("video/"):
                path = path.rename(path.with_suffix(".mp4"))  # any video's: the content decides
            try:
                yield path
            except SampleError as error:  # name what the user knows
                raise SampleError(error.reason, error.detail.replace(str(path), text)) from None


def _update(listing: Any, before: str, values: Iterable[Any], after: str) -> None:
    """Hash the text of `values` as Python writes a list, without making one."""
    for i, value in enumerate(values):
        listing.update(f"{', ' if i else before}{value!r}".encode("utf-8", "surrogatepass"))
    listing.update(after.encode())


def _is_video(data: bytes) -> bool:
    """Whether the first bytes are a video's; else it should be a picture."""
    boxes = data[4:8] == b"ftyp" and data[8:12] not in (b"avif", b"avis", b"mif1", b"heic")
    return boxes or data[:4] == b"\x1aE\xdf\xa3" or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")


@contextmanager
def _temporary(suffix: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dfm-") as folder:
        yield Path(folder, f"media{suffix}")


def _pick(rows: Rows, label: str, flag: str, given: str | None, usual: Sequence[str]) -> list[str]:
    """The column that was asked for, or those with a usual name; ValueError says which there are."""
    there = ", ".join(rows)
    if given is not None and given not in rows:
        raise ValueError(f"{label} has no column {given!r}; choose {flag} from {there}")
    found = [name for name in usual if name in rows] if given is None else [given]
    if not found:
        raise ValueError(f"{label} has none of {', '.join(usual)}; choose {flag} from {there}")
    return found


def _open(spec: str, limits: _fetch.Limits) -> tuple[Rows, Path]:
    """Rows of a table by path or URL, and the folder that relative paths in it refer to."""
    if spec.startswith("hf://"):
        return open_rows(_fetch.hub_file(spec)), Path()
    if spec.startswith(FETCHED):
        with _temporary(Path(unquote(urlsplit(spec).path)).suffix.lower()) as path:
            try:
                _fetch.download(spec, path, limits, accept_text=True)
            except SampleError as error:
                raise ValueError(f"{error.detail}; or download it and give its local path") from None
            return open_rows(path), Path()
    path = Path(url2pathname(urlsplit(spec).path) if spec.startswith("file://") else spec).expanduser()
    return open_rows(path), path.parent


def build(
    spec: str | pd.DataFrame | None = None,
    image_column: str | None = None,
    caption_column: str | None = None,
    limits: _fetch.Limits = _fetch.DEFAULT_LIMITS,
    **options: Any,
) -> Table:
    """The source of `table:FILE`.

    Parameters
    ----------
    spec : path, `hf://datasets/OWNER/NAME/PATH` or http(s) URL of a .csv, .tsv, .jsonl or .parquet file; or a
        DataFrame, whose relative paths start at the working directory.
    image_column, caption_column : default: all media columns and the first caption column with a usual name.
    limits : of each download.
    **options : see `MediaOptions`; without `allow_outside` a table that is fetched may not name paths outside the
        working directory, others always may.

    Raises
    ------
    ValueError, FileNotFoundError, IsADirectoryError : the table cannot be read or lacks the columns.
    """
    reading = MediaOptions(**options)
    if hasattr(spec, "columns"):
        rows, folder, label = frame_rows(spec), Path(), "dataframe"
    elif spec:
        rows, folder = _open(spec, limits)
        label = Path(urlsplit(spec).path).name or spec
    else:
        raise ValueError("name the table: --source table:FILE (.csv, .tsv, .jsonl or .parquet)")
    media = _pick(rows, label, "--image-column", image_column, MEDIA_COLUMNS)
    usual = [name for name in CAPTION_COLUMNS if name not in media]
    caption = _pick(rows, label, "--caption-column", caption_column, usual)[0]
    if not (isinstance(spec, str) and spec.startswith(FETCHED)):
        reading = replace(reading, allow_outside=True)
    return Table("table", rows, label, folder, media, caption, reading, limits)
