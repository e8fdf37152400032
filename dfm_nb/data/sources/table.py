"""`table:FILE`: rows of a CSV, TSV, JSON, JSONL or parquet file, each with captions and an image or a video.

The table is a local path or a URL that fsspec opens. A folder of parquet files, as Hugging Face's datasets have it
(`hf://datasets/OWNER/NAME`, or local), is one table; `train`, `test` or `validation` in a file's name is its split. The
media column holds image bytes (raw, or the hub's struct of bytes and path), a path (absolute, or relative to the
table), a file:// URL or an http(s) URL. Of several such columns (`image`, `image_url`, ...) each row uses the first
that is not empty. A table that you name may hold any path; one that is fetched, only names of files at its own place
and addresses of the internet, unless `allow_outside`. From Python the table may be a DataFrame, whose media column may
also hold PIL images and uint8 arrays. A caption is a text or a list of texts; a column `tags` or `keywords` holds tags,
`weight` or `repeats` how often an epoch uses the row, and `split` what is held out (val, test). Pictures in `source`,
`input_image`, `control_path`, `edit_image` and the like (`GIVEN`; several columns, or lists) are given beside the
row's picture, which may be in `edited_image` or another `TARGET`: a model makes it of them and of the caption. An empty
cell there gives none. Other columns with pictures are reported.

An empty cell, a null and a NaN are None. No type is guessed in a text file: the caption 007 stays "007", NA is text.
A text file is UTF-8, UTF-16 with its mark, or else Windows-1252, as Excel writes; the header of a CSV says which of
comma, semicolon and tab it has.
"""

import ast
import contextlib
import csv
import io
import itertools
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import url2pathname

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dfm_nb.base.files import parsed, read_text
from dfm_nb.base.limits import MOST_BYTES, MOST_CELLS, MOST_ROWS
from dfm_nb.base.log import log
from dfm_nb.base.options import option
from dfm_nb.base.records import Clip, Said, SampleError
from dfm_nb.base.urls import HTTP, file_in, reported, uses_fsspec
from dfm_nb.data.captioning import TAG_COLUMNS, WEIGHT_COLUMNS, tags_of, texts_of
from dfm_nb.data.sources._location import COMPARED_BYTES, Location, RowSource, fetched, parent
from dfm_nb.data.sources._media import MEDIA_SUFFIXES, MediaOptions, key_of, listing_sha256

if TYPE_CHECKING:
    import pandas as pd


class Flags(MediaOptions):
    image_column: str | None = option(None, "tables and lists: column with image bytes, paths or URLs")
    caption_column: str | None = option(None, "tables and lists: column with captions")
    given_column: str | None = option(
        None, "tables and lists: column with pictures or clips that are given beside the row's; several with commas"
    )


_KINDS = r"(_?(images?|imgs?|pictures?|videos?|paths?|file|name))*(_?\d+)?"
TARGET = re.compile("(target|edited|output)" + _KINDS, re.IGNORECASE)
GIVEN = re.compile(
    "(source|src|input|original|orig|control|condition(ing)?|cond|edit|ref(erence)?|kontext)" + _KINDS, re.IGNORECASE
)
"""Names of columns, if they hold media: what is to be made, and what is given for it."""
OF_PICTURES = re.compile("image|img|picture|video|(source|input|output|target)_file_name", re.IGNORECASE)
"""In such a name of a column. Paths in others, as in `source` or `original_filename`, count if their files are here."""
MEDIA_COLUMNS = (
    "image video image_path video_path path file file_name filename image_url video_url url "
    "edited_image target_image target_img edited_img output_image output_file_name target_file_name"
).split()
"""The last seven as data sets of edits call the picture that is to be made."""
SOURCES_TRIED = 100  # rows
CAPTION_COLUMNS = "caption text prompt name edit_prompt instruction edit description captions texts".split()
SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
BINARY = (pa.binary(), pa.large_binary())
TEXT = (pa.string(), pa.large_string())
GROUPS_HELD = 2  # row groups of a parquet column of pictures that are in memory
TIMES = 4  # bytes in memory for each one in a parquet file
MORE = 1 << 26  # on top, for a row group of pictures
MORE_TEXT = 1 << 28  # on top, for texts

Rows = Mapping[str, Sequence[Any]]
"""A table: {column: its values}."""


# ---- reading tables ------------------------------------------------------------------------------


class StoredPictures(Sequence):
    """A parquet column of pictures, read by row groups. Safe to share between threads.

    With groups of 3, 3 and 2 rows they start at rows 0, 3 and 6, and row 4 is row 1 of group 1.
    """

    def __init__(self, files: Sequence[pq.ParquetFile], column: str, lock: threading.Lock):
        self._lock = lock
        kind = files[0].schema_arrow.field(column).type
        self.lists = pa.types.is_list(kind)
        kind = kind.value_type if self.lists else kind
        self.holds_media = kind in BINARY or (pa.types.is_struct(kind) and "bytes" in {field.name for field in kind})
        self._sizes = []
        groups = []
        rows = [0]
        for file in files:
            for number in range(file.num_row_groups):
                groups.append((file, number))
                rows.append(file.metadata.row_group(number).num_rows)
                self._sizes += [c.total_uncompressed_size for c in _chunks(file, [number], [column])]
        self._starts = np.cumsum(rows)

        @lru_cache(GROUPS_HELD)
        def column_of(group: int) -> pa.ChunkedArray:
            file, number = groups[group]
            try:
                return pa.Table.from_batches(bounded(file, [number], [column], MORE)).column(0)
            except ValueError as error:
                raise SampleError("too_large", str(error)) from None

        self._group = column_of

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def state(self) -> object:
        """What differs when the pictures do: their content, beyond `COMPARED_BYTES` the sizes of row groups."""
        return self._sizes if sum(self._sizes) > COMPARED_BYTES else listing_sha256(self)

    def __getitem__(self, row: Any) -> Any:
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        # or threads that miss the same group would all read it; the columns share the files
        with self._lock:
            return self._group(group)[row - int(self._starts[group])].as_py()


def _chunks(file: pq.ParquetFile, groups: Iterable[int], columns: Sequence[str]) -> list[Any]:
    """What the footer says of these columns in these row groups."""
    chunks = []
    for group in groups:
        about = file.metadata.row_group(group)
        every = map(about.column, range(about.num_columns))
        chunks += [chunk for chunk in every if chunk.path_in_schema.partition(".")[0] in columns]
    return chunks


def bounded(file: pq.ParquetFile, groups: Sequence[int], columns: Sequence[str], more: int) -> Iterator[pa.RecordBatch]:
    """Columns of row groups. A few bytes may mean many, by compression or by a dictionary of which each row has one.

    Raises
    ------
    ValueError : they take more than `TIMES` their bytes in the file and `more`.
    """
    chunks = _chunks(file, groups, columns)
    stored = sum(chunk.total_compressed_size for chunk in chunks)
    sizes = [chunk.total_uncompressed_size for chunk in chunks]
    most = TIMES * stored + more
    limit = f"{TIMES} times its {stored} bytes and {more >> 20} MiB"
    too_large = f"{', '.join(columns)} must take at most {limit} in memory; write smaller row groups"
    if sum(sizes) > most:
        raise ValueError(too_large)
    rows = min(4096, max(16, MORE // (max(sizes, default=0) + 1)))
    held = 0
    for batch in file.iter_batches(rows, list(groups), list(columns)):
        held += batch.nbytes
        if held > most:
            raise ValueError(too_large)
        yield batch


def read_rows(path: Path, files: Sequence[pq.ParquetFile] = ()) -> Rows:
    """The rows of a file, read by its suffix; for parquet, only text is held in memory, not pictures.

    Parameters
    ----------
    files : opened parquet files whose rows, end to end, are the table; `path` then only names it.

    Raises
    ------
    FileNotFoundError : the path. ValueError : its kind or content, with the line where known.
    """
    if not (files or path.is_file()):
        raise FileNotFoundError(f"{path} is no file; pass a table ({', '.join(SUFFIXES)}), or a folder as folder:DIR")
    suffix = path.suffix.lower()
    try:
        if files or suffix == ".parquet":
            return _parquet_rows(files or [_footer(path)])
        if suffix in SUFFIXES:
            return _read_text(path, suffix)
        raise ValueError(f"it must end in {', '.join(SUFFIXES)}; convert or rename it")
    except (ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _parquet_rows(files: Sequence[pq.ParquetFile]) -> Rows:
    """Texts and numbers are read; pictures are on access, as are times, which Python's types may not hold."""
    schema = files[0].schema_arrow
    for file in files:
        names = file.schema_arrow.names
        if names != schema.names:
            raise ValueError(f"its files must have the same columns; {schema.names} and {names}")
    lock = threading.Lock()
    rows = dict[str, Any]()
    for column in schema:
        texts = getattr(column.type, "value_type", None) in TEXT  # in lists
        nested = pa.types.is_nested(column.type) and not texts
        if nested or pa.types.is_temporal(column.type) or column.type in BINARY:
            rows[column.name] = StoredPictures(files, column.name, lock)
        else:
            rows[column.name] = []
    in_memory = [name for name, values in rows.items() if isinstance(values, list)]
    more = max(MORE_TEXT // len(files), MORE_TEXT >> 3)
    for file in files:
        for batch in bounded(file, range(file.num_row_groups), in_memory, more):
            for name, values in batch.to_pydict().items():
                rows[name] += map(_cell, values)
    return rows


def _footer(file: Any) -> pq.ParquetFile:
    """A parquet file, of which only the footer is read; ValueError if that says what cannot be."""
    opened = pq.ParquetFile(file)
    about = opened.metadata
    rows = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
    if min(rows, default=0) < 0 or sum(rows) != about.num_rows or about.num_rows > MOST_ROWS:
        raise ValueError(f"a parquet file must have at most {MOST_ROWS} rows; its footer says {about.num_rows}")
    return opened


def _cell(value: Any) -> Any:
    """None where a cell is empty: also NaN, and text of spaces."""
    if isinstance(value, str):
        return value if value.strip() else None
    return None if isinstance(value, float) and math.isnan(value) else value


def _read_text(path: Path, suffix: str) -> Rows:
    try:
        text = read_text(path)
    except UnicodeDecodeError:
        text = path.read_bytes().decode("cp1252", "replace")
        word = next(word for word in text.split() if not word.isascii())
        if "\ufffd" in text:
            raise ValueError("it is neither UTF-8 nor Windows-1252; save it as UTF-8 (Excel: CSV UTF-8)") from None
        said = "%s is not UTF-8 and is read as Windows-1252, with words such as %r; if they are wrong save it as UTF-8"
        log.warning(said, path.name, word)
    lines = io.StringIO(text, newline="")
    if suffix in (".jsonl", ".json"):
        records = list(_records(lines)) if suffix == ".jsonl" else _json_records(text)
        names = dict.fromkeys(itertools.chain.from_iterable(records))
        check_cells(len(records) * len(names), len(text))
        return {name: [_cell(record.get(name)) for record in records] for name in names}
    separator = "\t" if suffix == ".tsv" else max(",;\t", key=text.partition("\n")[0].count)
    columns = [(name.strip(), cells) for name, *cells in zip(*_csv_rows(lines, separator, len(text)))]
    uses = Counter(name for name, _ in columns if name)
    twice = [name for name, count in uses.items() if count > 1]
    if twice:
        raise ValueError(f"its header has the column {', '.join(twice)} more than once; rename or remove one")
    return {name: list(map(_cell, cells)) for name, cells in columns}


def check_cells(cells: int, characters: int) -> None:
    """ValueError for a table of far more cells than its text can have said: most are filled in, and take memory."""
    if cells > max(characters, MOST_CELLS):
        raise ValueError(f"its {characters} characters mean {cells} cells, nearly all empty; drop columns")


def _csv_rows(lines: Iterable[str], separator: str, characters: int) -> Iterator[list[str]]:
    """The header and the rows, all of its length."""
    # Python's is 128 kB, and one long caption is a fault of its row alone
    csv.field_size_limit(MOST_BYTES)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    width = 0
    begin = 1
    try:
        for rows, row in enumerate(reader, 1):
            width = width or len(row)
            check_cells(rows * width, characters)
            if len(row) > width:
                fix = f"quote cells that hold {separator!r}"
                raise ValueError(f"line {begin} has {len(row)} cells and the header {width} columns; {fix}")
            if row:
                yield [*row, *[""] * (width - len(row))]
            begin = reader.line_num + 1
    except csv.Error as error:
        fix = "close it at the end of its cell, and double those inside"
        raise ValueError(f"the row of line {begin} has a quote that is not closed ({error}); {fix}") from None


def _records(lines: Iterable[str]) -> Iterator[dict]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parsed(line)
        except ValueError as error:  # also an integer of thousands of digits
            raise ValueError(f"line {number} is not JSON ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"line {number} must be a JSON object; it is {type(record).__name__}")
        yield record


def _json_records(text: str) -> list[dict]:
    """Rows of a JSON file: a list of objects, or an object of captions (or objects) by file."""
    try:
        whole = parsed(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if isinstance(whole, dict):
        whole = [{"file_name": k, **(v if isinstance(v, dict) else {"caption": v})} for k, v in whole.items()]
    if not isinstance(whole, list) or not all(isinstance(record, dict) for record in whole):
        raise ValueError("it must be a list of objects, or an object with a caption for each file")
    return whole


# ---- the source ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """The columns of a table or list that are used, and what a row has in them. media : in order of preference."""

    rows: Rows
    media: list[str]
    caption: str | None
    tags: str | None
    weight: str | None
    given: list[str]

    def said(self, row: int, where: object) -> Said:
        """`where` names its caption in a SampleError."""
        tags = tags_of(self.rows[self.tags][row]) if self.tags else []
        if self.caption in (None, self.tags):
            return [], tags
        return texts_of(self.rows[self.caption][row], where), tags

    def weight_in(self, row: int) -> Any:
        return self.rows[self.weight][row] if self.weight else None

    def given_in(self, row: int) -> list[Any]:
        given = []
        for name in self.given:
            given += pictures_of(self.rows[name][row])
        return given


@dataclass
class Table(RowSource):
    """Items are rows.

    label : the table's name in keys, messages and the identity.
    location : what relative paths in the table refer to. With `allow_outside` paths may leave it, and URLs may name
        this machine's network.
    splits : of each row, where the names of the table's files or its column `split` say it.
    """

    name: str
    label: str
    location: Location
    columns: Columns
    splits: Sequence[str | None] = ()

    def __post_init__(self) -> None:
        self.tagged = self.columns.tags is not None

    def __len__(self) -> int:
        return len(self.columns.rows[self.columns.media[0]])

    def item_key(self, index: int) -> str:
        return f"{key_of(Path(self.label).name)}-{index:07d}"

    def identity(self) -> dict:
        """Captions, paths, URLs and pictures are hashed: see `Location.states` and `StoredPictures.state`."""
        rows = self.columns.rows
        media_columns = self.columns.media
        given = self.columns.given
        listing = []
        media = []
        states = []
        captions = list[Any]()
        for name in dict.fromkeys((*media_columns, *given)):
            values = rows[name]
            if isinstance(values, StoredPictures):
                states.append(values.state)
                continue
            if not _holds_pictures(values):
                listing += [name, *values]
            for value in values:
                for picture in pictures_of(value) or [None]:
                    media.append(_path(picture) if isinstance(picture, str) else picture)
        for column in (self.columns.caption, self.columns.tags):
            if column and not _holds_pictures(rows[column]):
                captions += rows[column]
        about = {
            "name": self.name,
            "table": self.label,
            "rows": len(self),
            "media_columns": media_columns,
            "caption_column": self.columns.caption,
            "listing_sha256": listing_sha256([*listing, *self.splits]),
            "contents_sha256": listing_sha256([*self.location.states(media), *states]),
            "captions_sha256": listing_sha256(captions),
            "weights_sha256": self.columns.weight and listing_sha256(rows[self.columns.weight]),
            "given_columns": given,
        }
        return {name: value for name, value in about.items() if value} | self.location.reading.identity()

    def read(self, index: int) -> Iterator[Clip]:
        where = f"row {index + 1} of {self.label}"
        with contextlib.suppress(SampleError):
            value, *_ = self.media(index)
            where += f" ({value})" if isinstance(value, str) else ""
        try:
            yield from super().read(index)
        except SampleError as error:
            raise SampleError(error.reason, f"{where}: {error.detail}") from None

    def said(self, index: int) -> Said:
        caption = repr(self.columns.caption)
        texts, tags = self.columns.said(index, caption)
        if not (texts or tags):
            raise SampleError("no_caption", f"{caption} must be text; it is empty; write a caption there")
        return texts, tags

    def media(self, index: int) -> list[Any]:
        for column in self.columns.media:
            value = next(iter(pictures_of(self.columns.rows[column][index])), None)
            if isinstance(value, (str, bytes, Image.Image, np.ndarray)):
                return list(map(_reference, (value, *self.columns.given_in(index))))
            if value is not None:
                kind = type(value).__name__
                raise SampleError("no_media", f"{column!r} must hold a picture, a path or a URL; it holds a {kind}")
        said = f"it has neither bytes, a path nor a URL in {' or '.join(self.columns.media)}"
        raise SampleError("no_media", said)

    def weight(self, index: int) -> Any:
        return self.columns.weight_in(index)


def _reference(value: Any) -> Any:
    """What `Location.media` opens, of a picture in a cell: a path of ~ or of a file:// URL is one of this machine."""
    if not isinstance(value, str):
        return value
    scheme = _split(value).scheme
    if scheme not in ("", "file", "http", "https"):
        raise SampleError("bad_url", f"it must be a path or a file, http or https URL; got {scheme}")
    return value if scheme.startswith("http") else str(_path(value))


def _path(reference: str) -> Path:
    """Of a path or a file:// URL."""
    return Path(os.path.expanduser(url2pathname(_split(reference).path) if "://" in reference else reference))


def _split(url: str) -> SplitResult:
    """The parts of a URL; all of a path is path, and of what has no form of a URL: no file will have that name."""
    if "://" in url:
        with contextlib.suppress(ValueError):
            return urlsplit(url)
    return SplitResult("", "", url, "", "")


def _exists(location: Location, reference: str) -> bool:
    """Whether a path names a file; False of a URL and of a table on a server, which are not asked."""
    return location.server is None and "://" not in reference and location.found(_path(reference)).is_file()


def pictures_of(value: Any) -> list[Any]:
    """What a cell holds, each a path or URL, bytes, an image or array."""
    if isinstance(value, str) and value.startswith("["):  # a list in a CSV
        with contextlib.suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(value)
    several = isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object)
    pictures = map(_picture, value if several else [value])
    return [picture for picture in pictures if picture is not None]


def columns_of(
    rows: Rows, label: str, flags: Flags, exists: Callable[[str], bool], needs_caption: bool = True
) -> Columns:
    """The columns that are used, by flags or usual names; unused columns with pictures or paths of media are reported.

    A column `source` may also be an author, an address or a name at the place where the picture came from, and
    `original_filename` what a file was called before. So texts in a column that is not named as one of pictures count
    if one of the first names a file here (`exists`).

    Raises
    ------
    ValueError : a column is missing, or there are no rows.
    """
    if not any(map(len, rows.values())):
        raise ValueError(f"{label} has no rows: there is nothing to read")

    def usual(names: Sequence[str]) -> str | None:
        return next((name for name in names if name in rows), None)

    def pick(flag: str, given: str | None, known: Sequence[str]) -> list[str]:
        wanted = known if given is None else (given,)
        columns = [name for name in wanted if name in rows]
        if not columns:
            missing = ", ".join(map(repr, wanted))
            raise ValueError(f"{label} has no column {missing}; choose {flag} from {', '.join(rows)}")
        return columns

    def is_one(of: re.Pattern, name: str) -> bool:
        return bool(of.fullmatch(name)) and bool(OF_PICTURES.search(name) or _has_media(rows[name], exists))

    with_media = [name for name in rows if _has_media(rows[name])]
    targets = [name for name in with_media if is_one(TARGET, name)]
    media = pick("--image-column", flags.image_column, targets or MEDIA_COLUMNS)
    if flags.given_column:
        given = [pick("--given-column", name.strip(), ())[0] for name in flags.given_column.split(",")]
    else:
        # beside a target, `image` is what it is made of
        others = [name for name in with_media if name not in media]
        given = [name for name in others if is_one(GIVEN, name) or (targets and name in MEDIA_COLUMNS)]
    captions = [name for name in (*CAPTION_COLUMNS, *TAG_COLUMNS) if name not in (*media, *given)]
    tags = usual(TAG_COLUMNS)
    weight = usual(WEIGHT_COLUMNS)
    if needs_caption or flags.caption_column or not (tags or weight or given or "split" in rows):
        caption: str | None = pick("--caption-column", flags.caption_column, captions)[0]
    else:
        caption = usual(captions)
        if caption is None:
            known = ", ".join(CAPTION_COLUMNS)
            log.warning("%s has no column of captions (known: %s); name one with --caption-column", label, known)
    unused = [name for name in with_media if name not in (*media, *given, caption)]
    if unused:
        said = "%s has pictures or paths in %s, not used; --given-column gives them to the model, --image-column makes"
        log.warning(f"{said} them what is trained on", label, ", ".join(unused))
    return Columns(rows, media, caption, tags, weight, given)


def _has_media(values: Sequence[Any], exists: Callable[[str], bool] | None = None) -> bool:
    """Whether a column's first cells hold pictures or names of media; with `exists` a name must be that of a file."""
    if isinstance(values, StoredPictures):
        return values.holds_media
    for value in itertools.islice(values, SOURCES_TRIED):
        picture = next(iter(pictures_of(value)), None)
        if isinstance(picture, str) and exists:
            holds = exists(picture)
        elif isinstance(picture, str):
            holds = PurePosixPath(_split(picture).path).suffix.lower() in MEDIA_SUFFIXES
        else:
            is_array = isinstance(picture, np.ndarray) and picture.ndim > 1
            holds = is_array or isinstance(picture, (bytes, Image.Image))
        if holds:
            return True
    return False


def _picture(value: Any) -> Any:
    """A path or URL, bytes, an image or array; None where there is none."""
    if isinstance(value, Mapping):  # the hub's struct is its bytes, or its path when it has none
        value = value.get("bytes") or value.get("path") or None
    if isinstance(value, (bytearray, memoryview)):
        value = bytes(value)
    return str(value).strip() if isinstance(value, (str, os.PathLike)) else value


def _holds_pictures(values: Sequence[Any]) -> bool:
    """Whether a column holds pictures themselves: PIL images, arrays, bytes, or the hub's struct of bytes and path."""
    kinds = (bytes, bytearray, Mapping, Image.Image, np.ndarray)
    return isinstance(values, StoredPictures) or any(isinstance(value, kinds) for value in values)


SPLITS = dict.fromkeys("train training".split(), "train") | dict.fromkeys("validation valid val dev".split(), "val")
SPLITS |= dict.fromkeys("test testing eval evaluation".split(), "test")
"""Words in a file's name that Hugging Face's datasets take for its split, in a folder's, and in a column `split`."""


def _split_of(name: str) -> str | None:
    """`val` or `test`, if a word of a file's name says so and none says `train`."""
    splits = set(map(SPLITS.get, re.split(r"[^a-z]+", name.lower())))
    if "train" in splits:
        return None
    return "val" if "val" in splits else "test" if "test" in splits else None


def held_out(cells: Iterable[Any], where: object) -> list[str | None]:
    """`val` or `test` where a cell of a column `split` says so; None for training's."""
    words = ["train" if cell is None else str(cell).strip().lower() for cell in cells]
    unknown = sorted(set(words) - SPLITS.keys())
    if unknown:
        said = "%s has the splits %s, whose rows are not held out; known are %s"
        log.warning(said, where, ", ".join(unknown[:8]), ", ".join(SPLITS))
    splits = map(SPLITS.get, words)
    return [None if split == "train" else split for split in splits]


def with_train(splits: list[str | None]) -> list[str | None]:
    """Where some are held out for validation, `train` for the rest; else --val-fraction and --test-fraction decide."""
    rest = "train" if "val" in splits else None
    return [split or rest for split in splits]


def _open(spec: str, location: Location, name: str) -> Rows:
    """The rows of one table by path or URL."""
    if location.server and not location.http and name.endswith(".parquet"):
        return read_rows(Path(name), [_parquet(location, name)])
    # a URL may have a signature behind the name
    with fetched(spec, Path(name).suffix) if location.http else location.local(name) as path:
        return read_rows(path)


def _parquet(location: Location, name: str) -> pq.ParquetFile:
    """A file that stays open; of one that a driver reads, row groups are fetched on demand."""
    with reported(f"{location.spec}/{name}"):
        if location.server and not location.http:
            return _footer(location.server.open(file_in(location.root, name)))
        with location.local(name) as path:
            return _footer(path)


def _open_all(location: Location) -> tuple[Rows, list[str | None]]:
    """The rows of all parquet files of a location, training's first, and the split of each."""
    names = [name for name in location.names() if name.lower().endswith(".parquet")]
    held = {name: _split_of(name) for name in names}
    names.sort(key=lambda name: (bool(held[name]), name))  # --limit takes from training first
    if not names:
        raise FileNotFoundError(f"{location.spec} has no parquet files; pass a table ({', '.join(SUFFIXES)}) in it")
    files = [_parquet(location, name) for name in names]
    splits = []
    for file, split in zip(files, with_train(list(map(held.get, names)))):
        splits += [split] * file.metadata.num_rows
    return read_rows(Path(location.spec), files), splits


def build(spec: "str | pd.DataFrame | None" = None, **options: Any) -> Table:
    """The source of `table:FILE`.

    Parameters
    ----------
    spec : path, or URL that fsspec opens, of a .csv, .tsv, .jsonl or .parquet file, or of a folder with parquet files,
        as `hf://datasets/OWNER/NAME` is; or a DataFrame, whose relative paths start at the working directory.
    **options : see `Flags`; by default all media columns and the first caption column with a usual name are used.
        Without `allow_outside` a table that is fetched may name neither paths outside its
        own place nor addresses of this machine's network, others always may.

    Raises
    ------
    ValueError, FileNotFoundError : the table cannot be read or lacks the columns.
    """
    if spec is None:
        raise ValueError(f"pass the table: --source table:FILE ({', '.join(SUFFIXES)})")
    reading = Flags(**options)
    splits = list[str | None]()
    own = reading.replace(allow_outside=True)
    if not isinstance(spec, str):
        cells = spec.astype(object).where(spec.notna(), None)
        rows: Rows = {str(name): list(map(_cell, cells[name].tolist())) for name in spec.columns}
        label = "dataframe"
        location = Location(".", own)
    else:
        remote = uses_fsspec(spec)
        path = Path(spec).expanduser()
        head = spec.partition("?")[0] if spec.startswith(HTTP) else spec  # the rest signs it
        folder, label = parent(head) if remote else (str(path.parent), path.name)
        if path.is_dir() or (remote and not label.lower().endswith(SUFFIXES)):
            # the tables of a local folder may be third-party, too
            location = Location(spec, reading)
            label = location.name
            rows, splits = _open_all(location)
        else:
            location = Location(folder, reading if remote else own)
            rows = _open(spec, location, label)
    columns = columns_of(rows, label, reading, partial(_exists, location))
    for name in columns.media:
        values = rows[name]
        if isinstance(values, StoredPictures):
            lists = values.lists
        else:
            lists = any(len(pictures_of(value)) > 1 for value in values)
        if lists:
            said = "%s has lists of pictures in %s: the first of each row is used; give others rows of their own"
            log.warning(said, label, name)
    if "split" in rows and not any(splits):
        splits = with_train(held_out(rows["split"], label))
    return Table("table", label, location, columns, splits)
