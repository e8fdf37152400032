"""`folder:DIR`: images, animations and videos of a folder and its sub-folders, captioned by text files or by name.

Images: png, jpg, webp, gif, avif, heic, jp2, bmp, tif; animated ones are clips. Videos: mp4, webm, mov, mkv, avi, mpg,
ts, wmv, flv, 3gp, ogv. Other kinds are counted and named with the command that converts them. The caption
of `a.png` is looked for in this order: a list in its folder or one above (`captions.csv`, or `metadata.csv`, `.jsonl`
or `.parquet` as Hugging Face's datasets have it: columns file or file_name, and caption or text), `a.txt`, its tags,
the file's name with - and _ as spaces. In `.jsonl` and `.parquet` it may be a list of captions. Tags are in the list's
column tags or keywords. A row names a path, absolute or from its list. A bare name that is not there is the only file
of that name in the folders below, if that has no caption of its own. Accents may be in either form (NFC, NFD).
A list's column weight or repeats says how often an epoch uses a file; without one, kohya's folder names do: files of
`10_cats` are used 10 times.
`a.source.png` (or `a.source1.png`, `a.source2.png`, ...) is given beside `a.png`: a model makes `a.png` of it and of
the caption. A list may name such files in a column source, input_image, conditioning_image or the like.
Folders `validation` (or `val`, `valid`, `dev`) and `test` next to `train`, and a list's column `split`, say what is
held out.
The folder may be a .zip or at a URL (`s3://`, `gs://`, `https://`, `hf://datasets/OWNER/NAME`, a chain of fsspec):
each file is fetched when it is read. Files are read in sorted order, hidden ones are skipped, transparent pixels are
put on `background`. An unusable or missing file raises a `SampleError` that names it. So does a file
outside the folder, unless `allow_outside`: the folder's author must not choose other files of this machine.
"""

import contextlib
import itertools
import os
import posixpath
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from dfm_nb.base import video
from dfm_nb.base.files import read_text
from dfm_nb.base.log import log
from dfm_nb.base.records import Clip, SampleError, Source
from dfm_nb.data import captioning
from dfm_nb.data.sources import table
from dfm_nb.data.sources._location import Location
from dfm_nb.data.sources._media import MEDIA_SUFFIXES, UNREAD, MediaOptions, key_of, listing_sha256

Flags = MediaOptions
LISTS = ("captions.csv", "metadata.csv", "metadata.jsonl", "metadata.parquet")
FILE_COLUMNS = ("file", "file_name", "filename", "image", "video", "path", *table.TARGET_COLUMNS)
KNOWN_SUFFIXES = MEDIA_SUFFIXES | {".md", ".txt", *(Path(name).suffix for name in LISTS)}
REPEATS = re.compile(r"([1-9]\d{0,2})_\D")
"""Begins kohya's folder names; not 01_cats nor 2024_cats, which number or date the folder."""
LARGEST_LIST = 1 << 28  # bytes; a list takes eight times its own in memory
SOURCE = re.compile(r"(.+)\.source(\d*)")
"""A file's path, without suffix, that is given beside the file of the path before `.source`."""
Said = tuple[list[str], list[str]]
"""Captions and tags."""


class Folder(Source):
    """Items are files; a video gives one or more clips."""

    name = "folder"

    def __init__(self, location: Location):
        self.location, self.reading, root = location, location.reading, location.spec
        names = sorted(location.names(), reverse=True)
        self.names = {_nfc(name): name for name in names} | {name: name for name in names}
        self.texts = {_nfc(posixpath.splitext(name)[0]): name for name in names if name.lower().endswith(".txt")}
        suffixes = Counter(PurePosixPath(name).suffix.lower() for name in names)
        media = {name for name in names if PurePosixPath(name).suffix.lower() in MEDIA_SUFFIXES}
        by_leaf: dict[str, list[str]] = defaultdict(list)
        for name in media:
            by_leaf[_nfc(posixpath.basename(name))].append(name)
        self.listed: dict[str, Said] = {}
        self.cells = dict[str, tuple[Any, Any]]()  # weights and splits of the lists, by file
        self.given = dict[str, list[str]]()
        for name in sorted(names, key=lambda name: name.count("/")):  # the nearest list comes last and counts
            folder, file = posixpath.split(name)
            if file.lower() in LISTS:
                with location.local(name) as path:
                    rows, cells, given = _read_captions(path, partial(self._named, folder), self.names)
                for row in [row for row in rows if row not in self.names and posixpath.dirname(row) == folder]:
                    below = [n for n in by_leaf[_nfc(posixpath.basename(row))] if n.startswith(folder and f"{folder}/")]
                    if len(below) == 1 and below[0] not in rows and not self._text_file(below[0]):
                        rows[below[0]] = rows.pop(row)
                        cells[below[0]] = cells.pop(row)
                self.listed |= rows
                self.cells |= cells
                self.given |= given
        tops = {name: table.SPLITS.get(name.lower().partition("/")[0]) for name in names if "/" in name}
        media -= self._pair(media)
        files = media | self.listed.keys()  # those that are listed and missing are reported when they are read
        split = {name: self.cells.get(name, (None, None))[1] for name in files}
        if "train" in tops.values():
            split |= {name: top for name, top in tops.items() if name in files and top in ("val", "test")}
        self.files = sorted(files, key=lambda name: (bool(split[name]), name))  # --limit takes from `train` first
        self.splits = table.with_train([split[name] for name in self.files])
        for command, unread in UNREAD.items():
            if found := ", ".join(f"{suffixes.pop(s)} {s}" for s in unread if s in suffixes):
                log.warning("%s has %s files, which are not read; convert them, each with: %s", root, found, command)
        if repeated := {f for f in map(posixpath.dirname, self.files) if REPEATS.match(posixpath.basename(f))}:
            log.info("Files of %s are used as often as their folders' names say", ", ".join(sorted(repeated)))
        if other := ", ".join(f"{n} {s or 'without suffix'}" for s, n in suffixes.items() if s not in KNOWN_SUFFIXES):
            log.info("%s also has files that are neither images nor videos: %s", root, other)
        self.tagged = any(tags for _, tags in self.listed.values())
        bare = [n for n in self.files if n not in self.listed and not self._text_file(n)]
        if bare:
            said = "%d of %d files in %s have no caption, so their names are used, as for %s; add %s or a .txt for each"
            log.warning(said, len(bare), len(self.files), root, bare[0], LISTS[0])

    def _pair(self, media: set[str]) -> set[str]:
        """Find what is given by its name; returns all files that are given and thus no items of their own."""
        stems = {name: posixpath.splitext(name)[0] for name in sorted(media)}
        sources = {name: match for name, stem in stems.items() if (match := SOURCE.fullmatch(stem))}
        targets = {stem: name for name, stem in stems.items() if name not in sources}
        for place, _, name in sorted((match[1], int(match[2] or 0), name) for name, match in sources.items()):
            if (target := targets.get(place)) and name not in self.listed:
                self.given.setdefault(target, []).append(name)
        if self.given:
            log.info("%d files have given pictures or clips", len(self.given))
        return {name for names in self.given.values() for name in names} - self.listed.keys()

    def __len__(self) -> int:
        return len(self.files)

    def item_key(self, index: int) -> str:
        return key_of(self.files[index])

    def item_split(self, index: int) -> str | None:
        """The split of the item's folder, or of its row in a list."""
        return self.splits[index]

    def identity(self) -> dict:
        sizes = map(self.location.size, self.files)
        texts = (None if self._listed(name)[0] else self._text_file(name) for name in self.files)
        return {
            "name": self.name,
            "folder": self.location.name,
            "files": len(self.files),
            "listing_sha256": listing_sha256(zip(self.files, sizes)),
            "contents_sha256": listing_sha256(self.location.states(self.files)),
            "captions_sha256": listing_sha256(zip(map(self._listed, self.files), self.location.states(texts))),
            **({"splits": sorted({*filter(None, self.splits)})} if any(self.splits) else {}),
            **(
                {"splits_sha256": listing_sha256(self.splits)} if any(split for _, split in self.cells.values()) else {}
            ),
            **({"weights_sha256": listing_sha256(weights)} if any(weights := [*map(self._weight, self.files)]) else {}),
            **({"given_sha256": listing_sha256(given)} if (given := self._given_states()) else {}),
            **self.reading.identity(),
            "allow_outside": self.reading.allow_outside,
        }

    def _given_states(self) -> list[object]:
        pairs = [(file, name) for file, names in sorted(self.given.items()) for name in names]
        return [*pairs, *self.location.states(name for _, name in pairs)]

    def _listed(self, name: str) -> Said:
        return self.listed.get(name, ([], []))

    def _weight(self, name: str) -> Any:
        """What its list says, else the name of its folder; None: nothing."""
        of_folder = REPEATS.match(posixpath.basename(posixpath.dirname(name)))
        return listed if (listed := self.cells.get(name, [None])[0]) is not None else of_folder and of_folder[1]

    def _named(self, folder: str, path: str) -> str:
        """The file that a row of a list in `folder` means, by its name in the location: `/me/set/a.png` is `a.png`."""
        path = path.strip().replace("\\", "/")
        if self.location.server is None and path.startswith("/"):
            root, file = Path(os.path.realpath(self.location.folder)), Path(os.path.realpath(posixpath.dirname(path)))
            if file.is_relative_to(root):
                folder, path = "", (file / posixpath.basename(path)).relative_to(root).as_posix()
        path = posixpath.normpath(posixpath.join(folder, path))
        return self.names.get(path) or self.names.get(_nfc(path), path)

    def _text_file(self, name: str) -> str | None:
        """`sub/a.txt` for `sub/a.png`, if there is one; its suffix in any case."""
        return self.texts.get(_nfc(posixpath.splitext(name)[0]))

    def captions(self, index: int) -> Said:
        """The captions of a file and its tags; SampleError when what should hold them does not."""
        path = PurePosixPath(self.files[index])
        texts, tags = self._listed(self.files[index])
        if not texts and (name := self._text_file(self.files[index])):
            with self.location.local(name) as file:
                texts = [_caption_file(file)]
        captioning.check_length([*texts, *tags], path)
        words = ", ".join(tags) or re.sub(r"[_\-.\s]+", " ", path.stem).strip()
        if not (texts or words):
            raise SampleError("no_caption", f"{path} has no caption and no usable name; add {path.stem}.txt")
        return texts or [words], tags

    def read(self, index: int) -> Iterator[Clip]:
        name, ((caption, *more), tags) = self.files[index], self.captions(index)
        if PurePosixPath(name).suffix.lower() not in MEDIA_SUFFIXES:
            said = f"{self.location.spec}/{name}, listed with a caption, is neither an image nor a video"
            raise SampleError("unknown_type", said)
        weight = captioning.weight_of(self._weight(name), name)
        about: dict[str, Any] = {"more_captions": more, "tags": tags, "weight": weight}
        if SOURCE.fullmatch(posixpath.splitext(name)[0]) and self.given and name not in self.listed:
            raise SampleError("no_target", f"{name} is given for a file that does not exist; add or remove one")
        with contextlib.ExitStack() as opened:
            path, *given = (opened.enter_context(self.location.local(n)) for n in (name, *self.given.get(name, ())))
            beside = self.reading.beside(given, self.item_key(index))
            for number, (key, frames, fps, lost) in enumerate(self.reading.clips(path, self.item_key(index))):
                yield Clip(key, frames, caption, fps, self.name, lost=lost, given=beside(number), **about)


_nfc = partial(unicodedata.normalize, "NFC")


def _read_captions(
    path: Path, named: Callable[[str], str], files: Container[str]
) -> tuple[dict[str, Said], dict[str, tuple[Any, Any]], dict[str, list[str]]]:
    """Captions and tags, weights and splits, and files that are given, by file from one of `LISTS`.

    Captions of one file add up, its last weight counts, and empty rows are ignored.

    named : gives the file that a row's path means.
    """
    if path.is_file() and path.stat().st_size > LARGEST_LIST:
        raise ValueError(f"{path} is over {LARGEST_LIST >> 20} MiB; use it as --source table:FILE.parquet")
    rows = table.read_rows(path)
    file_column = next((c for c in FILE_COLUMNS if c in rows), None)
    kinds = table.CAPTION_COLUMNS, captioning.TAG_COLUMNS, captioning.WEIGHT_COLUMNS
    columns = [next((c for c in names if c in rows), None) for names in kinds]
    if file_column is None or not any(columns[:2]):
        raise ValueError(f"{path} must have the columns file and caption; it has {', '.join(rows)}")
    found, about, given = dict[str, Said](), dict[str, tuple[Any, Any]](), dict[str, list[str]]()
    splits = table.held_out(rows["split"], path) if "split" in rows else itertools.repeat(None)
    beside = [rows[c] for c in table.given_columns(rows, file_column, exists=lambda said: named(said) in files)]
    for number, (file, split, caption, tags, weight) in enumerate(
        zip(rows[file_column], splits, *(rows[c] if c else itertools.repeat(None) for c in columns))
    ):
        said = captioning.texts_of(caption, f"the caption of {file} in {path}"), captioning.tags_of(tags)
        if file and any(said):
            texts, words = found.setdefault(name := named(str(file)), ([], []))
            texts += said[0]
            words += said[1]
            about[name] = weight, split
            if those := [named(str(one)) for cells in beside for one in table.pictures_of(cells[number])]:
                given[name] = those
    return found, about, given


def _caption_file(path: Path) -> str:
    """The text of a .txt, in one line."""
    video.check_regular(path)
    if (size := path.stat().st_size) > (most := captioning.LARGEST_CAPTION):
        raise SampleError("too_large", f"{path} must have at most {most} bytes; it has {size}; shorten it")
    try:
        text = " ".join(read_text(path).split())
    except UnicodeDecodeError as error:
        said = f"{path} must be UTF-8; byte {error.start} is not; save it as UTF-8"
        raise SampleError("caption_not_utf8", said) from None
    if not text:
        raise SampleError("no_caption", f"{path} has no caption; write one in it, or remove it to use the file's name")
    return text


def build(spec: str | None = None, **options: Any) -> Folder | table.Table:
    """The source of `folder:DIR`.

    Parameters
    ----------
    spec : the folder, a .zip, or a URL or chain that fsspec opens. One without pictures whose files are parquet tables
        gives their rows, as `table` does.
    **options : see `MediaOptions`; with `allow_outside` also files that a link or a list names outside the
        folder.

    Raises
    ------
    NotADirectoryError, ValueError : it is not a folder, has nothing to read, or a list of captions is malformed.
    """
    if not spec:
        raise ValueError("pass the folder: --source folder:DIR")
    location = Location(spec, MediaOptions(**options))
    if location.server is None and not location.folder.is_dir():
        raise NotADirectoryError(f"--source folder:{spec} is not a folder; pass one with images or videos")
    source = Folder(location)
    if not len(source):
        if any(name.lower().endswith(".parquet") and not name.lower().endswith(LISTS) for name in source.names):
            return table.build(spec, **options)
        kinds = ", ".join(sorted(s[1:] for s in MEDIA_SUFFIXES))
        raise ValueError(f"{spec} has no images or videos ({kinds}); pass a folder that has some")
    return source
