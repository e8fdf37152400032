"""`folder:DIR`: images, animations and videos of a folder and its sub-folders, captioned by text files or by name.

Images: png, jpg, webp, gif, avif, heic, jp2, bmp, tif; animated ones are clips. Videos: mp4, webm, mov, mkv, avi, mpg,
ts, wmv, flv, 3gp, ogv. Other kinds are counted and named with the command that converts them. The caption
of `a.png` is looked for in this order:

1. a list in its folder or one above: `captions` or `metadata` as .csv, .tsv, .jsonl or .parquet, `captions.json` or
   kohya's `meta_cap.json`, with columns as a table's (`dfm_nb.data.sources.table`), each for itself: a row without a
   caption still gives its split, weight and given pictures;
2. `a.txt`, `a.caption` or `a.png.txt`; with `caption_lines="each"` each line is a caption;
3. `a.json` or `a.png.json` with caption, text or prompt;
4. its tags;
5. the words of a folder as kohya names them: files of `10_sks dog` are "sks dog", used 10 times;
6. its folder's name, where the file's name is a camera's or a number;
7. the file's name with - and _ as spaces.

A row names a path, absolute or from its list. A bare name that is not there is the only file of that name in the
folders below, if that has no caption of its own. A list's column weight or repeats says how often an epoch uses a
file, before kohya's folders do.
`a.source.png` (or `a.source1.png`, `a.source2.png`, ...; OneTrainer's `a-condlabel.png`) is given with `a.png`, or
`control/a.png` with `target/a.png`: a model makes the one of the other and of the caption. A list may name such files
in a column source, input_image, control_path or the like. All names are compared by `matched`.
Folders `validation` (or `val`, `valid`, `dev`) and `test` next to `train`, and a list's column `split`, say what is
held out.
The folder may be a .zip or at a URL (`s3://`, `gs://`, `https://`, `hf://datasets/OWNER/NAME`, a chain of fsspec):
each file is fetched when it is read. Files are read in sorted order, hidden ones are skipped, transparent pixels are
put on `background`. An unusable or missing file raises a `SampleError` that names it. So does a file
outside the folder, unless `allow_outside`: the folder's author must not choose other files of this machine.
"""

import itertools
import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from dfm_nb.base import video
from dfm_nb.base.files import parsed, plain, read_text
from dfm_nb.base.limits import MOST_TEXT
from dfm_nb.base.log import legible, log
from dfm_nb.base.options import option
from dfm_nb.base.records import Said, SampleError
from dfm_nb.data.captioning import texts_of
from dfm_nb.data.sources import table
from dfm_nb.data.sources._location import Location, RowSource, matched
from dfm_nb.data.sources._media import MEDIA_SUFFIXES, UNREAD, key_of, listing_sha256


class Flags(table.Flags):
    caption_lines: Literal["whole", "each"] = option(
        "whole", "a .txt of several lines: one caption, or each line a caption"
    )


LISTS = set(map("".join, itertools.product(("captions", "metadata"), table.SUFFIXES)))
LISTS = LISTS - {"metadata.json"} | {"meta_cap.json"}
"""Without metadata.json, which any tool may write of anything."""
TEXT_SUFFIXES = (".caption", ".txt")  # of one picture; the later is preferred
KNOWN_SUFFIXES = MEDIA_SUFFIXES | {".md", *TEXT_SUFFIXES, *table.SUFFIXES}
REPEATS = re.compile(r"([1-9]\d{0,2})_(\D.*)")
"""Kohya's folder names; not 01_cats nor 2024_cats, which number or date the folder."""
CAMERA_WORDS = {
    *"img image images dsc dscn dscf dcim pxl mvi vid video mov gopr gh gx dji pic picture photo frame scan".split(),
    *"screenshot whatsapp wa at am pm file clip untitled copy".split(),
}
HASH = re.compile(r"(?=.*\d)[0-9a-f-]{8,}", re.IGNORECASE)  # facade-bed is words
PLAIN_FOLDERS = {
    *table.SPLITS,
    *"images image img imgs pictures photos videos clips data dataset target targets".split(),
}
SOURCE = re.compile(r"(.+?)(?:\.source|-condlabel)(\d*)", re.IGNORECASE)
"""A file's path, without suffix, that is given with the file of the path before `.source`."""
MASK = re.compile(r".+-masklabel", re.IGNORECASE)
"""OneTrainer's mask of a picture."""
GIVEN_FOLDERS = set(map("".join, itertools.product("control controls source input".split(), ("", "_1", "_2", "_3"))))
TARGET_FOLDERS = {"target", "targets", "output", "edited", "images"}
EXAMPLES = 3
OF_FOLDERS = "names of their folders"
OF_FILES = "names of files"
"""Where captions come from that nobody wrote."""


@dataclass
class Row:
    """What is written of a file.

    list_name : of the list that has its captions. file : what is beside it: a text, or a .json whose captions are
        `texts`. origin : where its caption comes from, in words.
    """

    texts: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    weight: Any = None
    split: str | None = None
    given: list[str] = field(default_factory=list)
    list_name: str = ""
    file: str | None = None
    origin: str = ""


class Folder(RowSource):
    """Items are files; a video gives one or more clips."""

    name = "folder"

    def __init__(self, location: Location, flags: Flags):
        self.location = location
        self.flags = flags
        names = sorted(location.names(), reverse=True)
        self.names = {matched(name): name for name in names} | {name: name for name in names}
        media = {name for name in names if _suffix(name) in MEDIA_SUFFIXES}
        self.texts = _by_stem(names, TEXT_SUFFIXES)
        self.records = _by_stem(names, (".json",))
        self.rows: dict[str, Row] = {}
        self._read_lists(names, media)
        self.orphans: set[str] = set()
        # those that are listed and missing are items too, which are reported when they are read
        files = (media | self.rows.keys()) - self._pair(media)
        split = {name: self._row(name).split for name in files}
        of_folders = {name: _folder_split(name) for name in names}
        if "train" in of_folders.values():
            for name in files & of_folders.keys():
                if of_folders[name] in ("val", "test"):
                    split[name] = of_folders[name]
        # --limit takes from `train` first
        self.files = sorted(files, key=lambda name: (bool(split[name]), name))
        self.splits = table.with_train(list(map(split.get, self.files)))
        self.tagged = any(row.tags for row in self.rows.values())
        for name in self.files:
            self._look_beside(name)
        self._lines_told = False
        self._report(names)

    def _read_lists(self, names: list[str], media: set[str]) -> None:
        by_leaf = defaultdict(list)
        stems = defaultdict(list)
        for name in media:
            by_leaf[matched(posixpath.basename(name))].append(name)
            stems[_stem(name)].append(name)
        # the nearest list comes last and counts
        for name in sorted(names, key=lambda name: name.count("/")):
            folder, leaf = posixpath.split(name)
            if leaf.lower() not in LISTS:
                continue
            with self.location.local(name) as path:
                rows = _read_list(path, self.flags, partial(self._named, folder, stems), self.names)
            for file in list(rows):
                if file in self.names or posixpath.dirname(file) != folder:
                    continue
                namesakes = by_leaf[matched(posixpath.basename(file))]
                below = [name for name in namesakes if name.startswith(folder and f"{folder}/")]
                if len(below) != 1 or below[0] in rows:
                    continue
                if not (rows[file].texts and self._beside(self.texts, below[0])):
                    rows[below[0]] = rows.pop(file)
            for file, row in rows.items():
                row.list_name = leaf if row.texts else ""
                said = {column: value for column, value in vars(row).items() if value not in (None, [], "")}
                self.rows[file] = replace(self._row(file), **said)

    def _look_beside(self, name: str) -> None:
        """Find where a file's caption comes from."""
        row = self.rows.setdefault(name, Row())
        row.file = self._beside(self.texts, name)
        if row.texts:
            row.origin = row.list_name
        elif row.file:
            row.origin = f"{_suffix(row.file)} files"
        else:
            record = self._beside(self.records, name)
            row.texts = self._json_captions(record) if record else []
            row.file = record if row.texts else None
            written = ".json files" if row.texts else row.tags and "tags"
            row.origin = written or self._words(name)[0]

    def _pair(self, media: set[str]) -> set[str]:
        """Find what is given by its name; returns all files that are given or masks, thus no items of their own."""
        targets = defaultdict(list)
        sources = []
        masks = set()
        has_targets = set()
        for name in media:
            has_targets |= _folders_above(name, TARGET_FOLDERS)
        for name in sorted(media):
            stem = _stem(name)
            match = SOURCE.fullmatch(stem)
            if MASK.fullmatch(stem):
                masks.add(name)
            elif match:
                sources.append((match[1], int(match[2] or 0), name))
            elif has_targets & _folders_above(name, GIVEN_FOLDERS):
                sources.append((_pair_stem(name), 0, name))
            else:
                targets[stem].append(name)
                if _folders_above(name, TARGET_FOLDERS):
                    targets[_pair_stem(name)].append(name)
        for stem, _, name in sorted(sources):
            if self._row(name).texts:
                continue
            if "*" in stem and stem not in targets:
                stem = re.sub(r"_\d+$", "", stem)  # musubi-tuner's control/a_0.png and a_1.png
            for target in targets[stem]:
                pictures = self.rows.setdefault(target, Row()).given
                if name not in pictures:  # a list may name it too
                    pictures.append(name)
            if not targets[stem]:
                self.orphans.add(name)
        given = [row.given for row in self.rows.values() if row.given]
        if given:
            log.info("%d files have given pictures or clips", len(given))
        else:
            self.orphans.clear()
        if masks:
            log.warning("%d masks such as %s are not used", len(masks), min(masks))
        return masks | {name for name in itertools.chain(*given) if not self._row(name).texts}

    def _report(self, names: list[str]) -> None:
        """Say what looks like data and is not used, and where captions come from."""
        root = self.location.spec
        suffixes = Counter(map(_suffix, names))
        for command, unread in UNREAD.items():
            kinds = ", ".join(f"{suffixes.pop(s)} {s}" for s in unread if s in suffixes)
            if kinds:
                log.warning("%s has %s files, which are not read; convert them, each with: %s", root, kinds, command)
        repeated = {f for f in map(posixpath.dirname, self.files) if REPEATS.fullmatch(posixpath.basename(f))}
        if repeated:
            log.info("Files of %s are used as often as their folders' names say", ", ".join(sorted(repeated)))
        other = ", ".join(f"{n} {s or 'without suffix'}" for s, n in suffixes.items() if s not in KNOWN_SUFFIXES)
        if other:
            log.info("%s also has files that are neither images nor videos: %s", root, other)
        idle = []
        for name in sorted(set(names).difference(self.rows[file].file for file in self.files)):
            known = posixpath.basename(name).lower() in LISTS | {"readme.txt", "license.txt"}
            if not known and _suffix(name) in (*TEXT_SUFFIXES, *table.SUFFIXES):
                idle.append(name)
        if idle and self.files:
            said = "%s has %d texts or tables that are not used, such as %s; rename a list to metadata.csv or the like"
            log.warning(f"{said}, or pass it as --source table:FILE", root, len(idle), ", ".join(idle[:EXAMPLES]))
        by_origin = defaultdict(list)
        for name in self.files:
            by_origin[self.rows[name].origin].append(name)
        self.captions_from = {}
        for origin, files in sorted(by_origin.items()):
            examples = files[:EXAMPLES]
            if origin in (OF_FOLDERS, OF_FILES):
                words = Counter(self._words(name)[1] for name in files)
                examples = [f"{word!r} ({n})" for word, n in words.most_common(EXAMPLES)]
            self.captions_from[origin] = f"{len(files)} from {origin}, such as {', '.join(examples)}"
        if self.captions_from:
            named = bool({OF_FOLDERS, OF_FILES} & by_origin.keys())
            fix = "; add captions.csv or a .txt for each" if named else ""
            said = "; ".join(self.captions_from.values())
            log.log(WARNING if named else INFO, "captions of %s: %s%s", root, said, fix)

    def __len__(self) -> int:
        return len(self.files)

    def item_key(self, index: int) -> str:
        return key_of(self.files[index])

    def media(self, index: int) -> list[str]:
        name = self.files[index]
        if _suffix(name) not in MEDIA_SUFFIXES:
            said = f"{self.location.spec}/{name}, listed with a caption, is neither an image nor a video"
            raise SampleError("unknown_type", said)
        if name in self.orphans:
            raise SampleError("no_target", f"{name} is given for a file that does not exist; add or remove one")
        return [name, *self.rows[name].given]

    def weight(self, index: int) -> Any:
        """What its list says, else the name of its folder."""
        name = self.files[index]
        listed = self.rows[name].weight
        of_folder = REPEATS.fullmatch(posixpath.basename(posixpath.dirname(name)))
        return listed if listed is not None else of_folder and of_folder[1]

    def identity(self) -> dict:
        sizes = map(self.location.size, self.files)
        rows = [self.rows[name] for name in self.files]
        listed = ((row.texts if row.list_name else [], row.tags) for row in rows)
        said = zip(listed, self.location.states(None if row.list_name else row.file for row in rows))
        by_folder = (name for name in self.files if self.rows[name].origin == OF_FOLDERS)
        of_folders = ((name, self._words(name)[1]) for name in by_folder)
        weights = [*map(self.weight, range(len(self)))]
        given = []
        for file in sorted(self.rows):
            given += [(file, name) for name in self.rows[file].given]
        about = {
            "name": self.name,
            "folder": self.location.name,
            "files": len(self.files),
            "listing_sha256": listing_sha256(zip(self.files, sizes)),
            "contents_sha256": listing_sha256(self.location.states(self.files)),
            "captions_sha256": listing_sha256(itertools.chain(said, of_folders)),
            "caption_lines": self.flags.caption_lines == "each" and "each",
            "splits": sorted({*filter(None, self.splits)}),
            "splits_sha256": any(row.split for row in self.rows.values()) and listing_sha256(self.splits),
            "weights_sha256": any(weights) and listing_sha256(weights),
            "given_sha256": given and listing_sha256([*given, *self.location.states(name for _, name in given)]),
        }
        own = self.flags.identity() | {"allow_outside": self.flags.allow_outside}
        return {name: value for name, value in about.items() if value} | own

    def _row(self, name: str) -> Row:
        return self.rows.get(name) or Row()

    def _named(self, folder: str, stems: Mapping[str, list[str]], path: str) -> str:
        """The file that a row of a list in `folder` means, by its name in the location: `/me/set/a.png` is `a.png`.

        A path without suffix, as kohya's lists have it, is the only picture or clip of that name.
        """
        path = path.strip().replace("\\", "/")
        if self.location.server is None and path.startswith("/"):
            root = Path(os.path.realpath(self.location.folder))
            place = Path(os.path.realpath(posixpath.dirname(path)))
            if place.is_relative_to(root):
                folder = ""
                path = (place / posixpath.basename(path)).relative_to(root).as_posix()
        path = posixpath.normpath(posixpath.join(folder, path))
        name = self.names.get(path) or self.names.get(matched(path))
        of_stem = stems.get(matched(path), [])
        return name or (of_stem[0] if len(of_stem) == 1 else legible(path))

    def _beside(self, by_stem: Mapping[str, str], name: str) -> str | None:
        """`sub/a.txt`, else `sub/a.png.txt`, for `sub/a.png`."""
        return by_stem.get(_stem(name)) or by_stem.get(matched(name))

    def _json_captions(self, file: str) -> list[str]:
        """The captions in a file's own .json; [] if it has none, as any tool may write such a file of anything."""
        try:
            with self.location.local(file) as path:
                record = parsed(read_text(plain(path, most_bytes=MOST_TEXT)))
            values = [record.get(key) for key in ("caption", "text", "prompt")] if isinstance(record, dict) else []
            texts = [value for value in values if isinstance(value, (str, list))]
            return texts_of(texts[0], file) if texts else []
        except (ValueError, OSError):  # SampleError too: the file is reported as not used
            return []

    def _words(self, name: str) -> tuple[str, str]:
        """Where a caption of names is from, and its words: a folder's, or the file's where that says something."""
        path = PurePosixPath(name)
        kohya = REPEATS.fullmatch(path.parent.name)
        if kohya:
            return OF_FOLDERS, _spaced(kohya[2])
        above = [place for place in path.parent.parts if place.lower() not in PLAIN_FOLDERS]
        if above and _says_nothing(path.stem) and not _says_nothing(above[-1]):
            return OF_FOLDERS, _spaced(above[-1])
        return OF_FILES, _spaced(path.stem)

    def said(self, index: int) -> Said:
        name = self.files[index]
        row = self.rows[name]
        if row.file and not row.texts:
            with self.location.local(row.file) as file:
                return self._text_captions(file), row.tags
        words = self._words(name)[1]
        if not (row.texts or row.tags or words):
            stem = PurePosixPath(name).stem
            raise SampleError("no_caption", f"{name} has no caption and no usable name; add {stem}.txt")
        return row.texts or ([] if row.tags else [words]), row.tags

    def _text_captions(self, path: Path) -> list[str]:
        """The captions in a .txt, with single spaces: all of it in one line, or each of its lines."""
        video.check_regular(path)
        size = path.stat().st_size
        if size > MOST_TEXT:
            said = f"{path} must have at most {MOST_TEXT} bytes; it has {size}; shorten it"
            raise SampleError("too_large", said)
        try:
            lines = [" ".join(line.split()) for line in read_text(path).splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            said = f"{path} must be UTF-8; byte {error.start} is not; save it as UTF-8"
            raise SampleError("caption_not_utf8", said) from None
        if not lines:
            said = f"{path} has no caption; write one in it, or remove it to use the file's name"
            raise SampleError("no_caption", said)
        if self.flags.caption_lines == "each":
            return lines
        if len(lines) > 1 and not self._lines_told:
            self._lines_told = True
            said = "the %d lines of %s are one caption, as in all such files; --caption-lines each makes each line one"
            log.info(said, len(lines), path.name)
        return [" ".join(lines)]


def _stem(name: str) -> str:
    """A file's path without suffix, in the form in which names are compared."""
    return matched(posixpath.splitext(name)[0])


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _folder_split(name: str) -> str | None:
    """The split that a folder's name says, as of `val/a.png`."""
    folders = name.lower().split("/")[:-1]
    return next(filter(None, map(table.SPLITS.get, folders)), None)


def _by_stem(names: Iterable[str], suffixes: Sequence[str]) -> dict[str, str]:
    """{path without its last suffix: file} of files with one of `suffixes`, the later ones preferred."""
    found = dict[str, str]()
    for suffix in suffixes:
        found |= {_stem(name): name for name in names if name.lower().endswith(suffix)}
    return found


def _folders_above(name: str, kinds: Container[str]) -> set[str]:
    """Where a path has a folder that is named as one of `kinds`: `set` of `set/control/a.png`."""
    *folders, _ = name.split("/")
    return {"/".join(folders[:i]) for i, folder in enumerate(folders) if folder.lower() in kinds}


def _pair_stem(name: str) -> str:
    """`set/control/a.png` and `set/target/a.jpg` are both `set/*/a`."""
    *folders, leaf = _stem(name).split("/")
    both = GIVEN_FOLDERS | TARGET_FOLDERS
    return "/".join([*("*" if folder.lower() in both else folder for folder in folders), leaf])


def _says_nothing(name: str) -> bool:
    """Whether a name is a camera's, a number, a date or a hash: IMG_2030, 0001, PXL_20240101_1."""
    words = re.findall(r"[^\W\d_]+", name.lower())
    return HASH.fullmatch(name) is not None or CAMERA_WORDS.issuperset(words)


def _spaced(name: str) -> str:
    return re.sub(r"[_\-.\s]+", " ", name).strip()


def _read_list(path: Path, flags: Flags, named: Callable[[str], str], files: Container[str]) -> dict[str, Row]:
    """What the rows of one of `LISTS` say, by file. Each column counts for itself.

    Captions of one file add up, its last weight counts, and it is held out if one of its rows says so.

    named : gives the file that a row's path means.
    """
    rows = table.read_rows(plain(path))
    columns = table.columns_of(rows, str(path), flags, exists=lambda said: named(said) in files, needs_caption=False)
    splits = table.held_out(rows["split"], path) if "split" in rows else itertools.repeat(None)
    places = [rows[name] for name in columns.media if not isinstance(rows[name], table.StoredPictures)]
    by_file = dict[str, Row]()
    nameless = 0
    for number, split in zip(range(len(rows[columns.media[0]])), splits):
        file = next((cells[number] for cells in places if isinstance(cells[number], str)), None)
        if file is None:
            nameless += 1
            continue
        row = by_file.setdefault(named(file), Row())
        texts, tags = columns.said(number, f"the caption of {file} in {path}")
        row.texts += texts
        row.tags += tags
        weight = columns.weight_in(number)
        row.weight = row.weight if weight is None else weight
        row.split = row.split or split
        row.given = [named(str(one)) for one in columns.given_in(number)] or row.given
    if nameless:
        log.warning("%d rows of %s are not used, because they name no file", nameless, path)
    return by_file


def build(spec: str | None = None, **options: Any) -> Folder | table.Table:
    """The source of `folder:DIR`.

    Parameters
    ----------
    spec : the folder, a .zip, or a URL or chain that fsspec opens. One without pictures whose files are parquet tables
        gives their rows, as `table` does.
    **options : see `Flags`; with `allow_outside` also files that a link or a list names outside the
        folder.

    Raises
    ------
    NotADirectoryError, ValueError : it is not a folder, has nothing to read, or a list of captions is malformed.
    """
    if not spec:
        raise ValueError("pass the folder: --source folder:DIR")
    flags = Flags(**options)
    location = Location(spec, flags)
    if location.server is None and not location.folder.is_dir():
        raise NotADirectoryError(f"--source folder:{spec} is not a folder; pass one with images or videos")
    source = Folder(location, flags)
    if not len(source):
        names = [name.lower() for name in source.names if not name.lower().endswith(tuple(LISTS))]
        if any(name.endswith(".parquet") for name in names):
            options.pop("caption_lines", None)
            return table.build(spec, **options)
        kinds = ", ".join(sorted(s[1:] for s in MEDIA_SUFFIXES))
        raise ValueError(f"{spec} has no images or videos ({kinds}); pass a folder that has some")
    return source
