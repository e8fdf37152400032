"""JSONL text to Megatron `.bin/.idx`: `preprocess`, and `merge` of its parts.

For each key `<prefix>_<key>_document.bin`, `.idx` and `.meta.json` (tokenizer, EOD id, counts, inputs) are written.
`.bin` and `.idx` are byte for byte what Megatron-LM's tools/preprocess_data.py writes, whatever the number of workers.
The final names appear only when whole. A run that was killed goes on from its last chunk when it is started again with
the same flags, and ends with the same bytes. Memory is a few chunks (1 MiB each) a worker, whatever the corpus's size.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Iterator

import numpy as np
from tqdm import tqdm

from dfm_nb.base.files import fsync_replace
from dfm_nb.text import tokenizer as text_tokenizer
from dfm_nb.text.chunk import BadLine, ChunkEncoder, ChunkSettings, Encoded, encode_in_worker, start_worker
from dfm_nb.text.index import Index, bin_path, idx_path, meta_path, optimal_dtype, read_meta, write_index
from dfm_nb.text.input import (
    CHUNK_BYTES,
    STDIN,
    Chunk,
    Span,
    chunks,
    expand_inputs,
    fingerprint,
    is_compressed,
    lines_before,
    partition,
)
from dfm_nb.text.parts import Parts
from dfm_nb.text.tokenizer import TokenizerSpec


@dataclass(frozen=True)
class PreprocessConfig:
    """The flags of `dfm text preprocess`; names follow Megatron-LM's tools/preprocess_data.py.

    `workers` processes tokenize beside the one that reads and writes; with 1 all is done in this process.
    `chunk_size` documents (1 MiB at most) go to a worker at a time, and are the unit of a restart.
    `partition` is (i, n): only the lines of part i, written under `<prefix>_part<i>-of-<n>`.
    """

    input: tuple[str, ...]
    output_prefix: str
    tokenizer_model: str
    json_keys: tuple[str, ...] = ("text",)
    workers: int = 1
    chunk_size: int = 8192
    append_eod: bool = False
    dtype: str | None = None
    on_error: str = "stop"
    partition: tuple[int, int] = (0, 1)
    max_document_bytes: int = 256 << 20
    resume: bool = True
    fast: bool = True
    progress: bool = True
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        for name in ("workers", "chunk_size", "max_document_bytes", "chunk_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more; got {getattr(self, name)}")
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"--on-error must be stop or skip; got {self.on_error!r}")
        if self.dtype not in (None, "uint16", "int32"):
            raise ValueError(f"--dtype must be uint16 or int32; got {self.dtype!r}")
        if not self.json_keys or len(set(self.json_keys)) != len(self.json_keys):
            raise ValueError(f"--json-keys must name different keys; got {' '.join(self.json_keys) or 'none'}")

    @property
    def prefix(self) -> str:
        return part_prefix(self.output_prefix, *self.partition)


@dataclass
class PreprocessResult:
    """What was written: prefixes by key and counts."""

    prefixes: dict[str, str]
    documents: int
    tokens: dict[str, int]
    empty_documents: dict[str, int]
    blank_lines: int
    skipped: int
    resumed_documents: int = 0
    skipped_path: str | None = None
    warnings: list[str] = field(default_factory=list)


def part_prefix(prefix: str, index: int, count: int) -> str:
    """`<prefix>` of one run, or of part `index` of `count`."""
    return prefix if count == 1 else f"{prefix}_part{index:05d}-of-{count:05d}"


def preprocess(config: PreprocessConfig) -> PreprocessResult:
    """Tokenize JSONL into an indexed corpus.

    Raises
    ------
    ValueError : bad flags or input; with on_error "stop" the first bad line, by file and number
    FileNotFoundError : an input that does not exist
    """
    paths = expand_inputs(list(config.input))
    spans = partition(paths, *config.partition)
    spec = text_tokenizer.load(config.tokenizer_model)
    dtype = np.dtype(config.dtype) if config.dtype else optimal_dtype(spec.vocab_size)
    spec.check_dtype(dtype)
    if config.append_eod:
        spec.require_eod()
    _make_folder(config.prefix)
    settings = ChunkSettings(
        config.json_keys,
        dtype.name,
        config.append_eod,
        config.max_document_bytes,
        config.on_error == "stop",
        config.fast,
    )
    signature = {
        "state": 2,  # of the part files and their progress
        "inputs": fingerprint(spans),
        "tokenizer": [spec.sha256, spec.eod_id],
        "settings": [list(config.json_keys), dtype.name, config.append_eod, config.max_document_bytes],
    }
    prefixes = {key: f"{config.prefix}_{key}_document" for key in config.json_keys}
    with _disk_errors(config.prefix), Parts.open(config.prefix, prefixes, signature, config.resume) as parts:
        progress = parts.progress
        resumed = progress.documents
        if not progress.finished:
            _run(config, spans, spec, settings, parts)
            # An input without one document is a mistake; a part that got none is not.
            if progress.documents == 0 and config.partition[1] == 1:
                skipped = f" ({progress.skipped} lines were skipped)" if progress.skipped else ""
                raise ValueError(
                    f"--input must hold at least one document; {', '.join(paths)} holds none{skipped}; "
                    "nothing is written"
                )
            meta = {
                "tokenizer": spec.name,
                "tokenizer_sha256": spec.sha256,
                "vocab_size": spec.vocab_size,
                "max_id": spec.max_id,
                "eod_id": spec.eod_id,
                "append_eod": config.append_eod,
                "dtype": dtype.name,
                "documents": progress.documents,
                "blank_lines": progress.blank_lines,
                "skipped": progress.skipped,
                "inputs": [asdict(s) for s in spans],
            }
            parts.finish(dtype, meta)
        parts.publish()
    warnings = [
        f"every text under {key!r} is empty: {prefixes[key]}.bin has no token"
        for key in config.json_keys
        if progress.documents and not progress.tokens[key]
    ]
    return PreprocessResult(
        prefixes,
        progress.documents,
        progress.tokens,
        progress.empty_documents,
        progress.blank_lines,
        progress.skipped,
        resumed,
        parts.skipped_path,
        warnings,
    )


def _make_folder(prefix: str) -> None:
    folder = Path(prefix).absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--output-prefix must be FOLDER/NAME; {folder} is or lies under a file") from None


def _run(
    config: PreprocessConfig, spans: list[Span], spec: TokenizerSpec, settings: ChunkSettings, parts: Parts
) -> None:
    done = parts.progress
    source = chunks(
        spans, config.chunk_size, config.max_document_bytes, done.span, done.offset, done.line, config.chunk_bytes
    )
    # The bar counts bytes of text; a compressed file's size is not known before it is read.
    known = not any(s.path == STDIN or is_compressed(s.path) for s in spans)
    total = sum((s.end or os.path.getsize(s.path)) - s.start for s in spans) if known else None
    bar = tqdm(total=total, unit="B", unit_scale=True, desc="tokenize", disable=not config.progress, mininterval=0.5)
    with bar, _encoded(source, spec, settings, config.workers) as results:
        for chunk, encoded in results:
            bad = [_record(spans, chunk, line) for line in encoded.bad]
            if bad and config.on_error == "stop":
                raise ValueError(
                    "{file}, line {line}: {reason}; it begins {excerpt!r}; correct it, or leave such lines out with "
                    "--on-error skip".format(**bad[0])
                )
            parts.append(chunk, encoded, bad)
            bar.update(len(chunk.data))
            bar.set_postfix_str(f"{done.documents} documents", refresh=False)


def _record(spans: list[Span], chunk: Chunk, bad: BadLine) -> dict[str, object]:
    """A bad line with its number in the file."""
    number = bad.line + lines_before(spans[chunk.span])
    return {"file": chunk.path, "line": number, "reason": bad.reason, "excerpt": bad.excerpt}


@contextlib.contextmanager
def _encoded(
    source: Iterator[Chunk], spec: TokenizerSpec, settings: ChunkSettings, workers: int
) -> Iterator[Iterator[tuple[Chunk, Encoded]]]:
    """Chunks with their encodings in order; at most `workers + 2` chunks are in flight."""
    if workers == 1:
        encoder = ChunkEncoder(spec, settings)
        yield ((chunk, encoder.encode(chunk)) for chunk in source)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (spec, settings))
    try:
        yield _in_order(pool, source, workers + 2)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process ended (out of memory, most often); run the same command again to go on from the last "
            "chunk, with fewer --workers or a smaller --chunk-size"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, source: Iterator[Chunk], depth: int) -> Iterator[tuple[Chunk, Encoded]]:
    waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
    for chunk in source:
        waiting.append((chunk, pool.submit(encode_in_worker, chunk)))
        if len(waiting) == depth:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


@contextlib.contextmanager
def _disk_errors(prefix: str) -> Iterator[None]:
    folder = Path(prefix).absolute().parent
    left = "nothing was written under the final names"
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ValueError(
                f"a file in {folder} may not grow further (a limit of the file system, or of this shell: ulimit -f); "
                f"{left}; raise the limit and run the same command again"
            ) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(
                f"the disk of {folder} is full; {left}; free space there and run the same command again: it goes on "
                "from the last chunk"
            ) from error
        raise


def find_parts(prefix: str, key: str = "text") -> list[str]:
    """The prefixes of all parts that `preprocess` wrote for `prefix`, in order.

    Raises
    ------
    FileNotFoundError : there are none, or one is missing
    """
    found = sorted(glob.glob(f"{glob.escape(prefix)}_part*-of-*_{key}_document.idx"))
    if not found:
        raise FileNotFoundError(
            f"parts of {prefix} are named {prefix}_part00000-of-0000n_{key}_document; none is there"
        )
    counts = {int(p[len(prefix) :].split("-of-")[1][:5]) for p in found}
    if len(counts) > 1:
        raise ValueError(
            f"the parts of {prefix} must be of one run; there are runs of {sorted(counts)} parts; delete one"
        )
    count = counts.pop()
    wanted = [f"{part_prefix(prefix, i, count)}_{key}_document" for i in range(count)]
    missing = [w for w in wanted if not idx_path(w).exists()]
    if missing:
        raise FileNotFoundError(f"all {count} parts must be there; {missing[0]}.idx is missing ({len(missing)} in all)")
    return wanted


def merge(prefixes: list[str], output: str, progress: bool = True) -> Index:
    """Join corpora in the given order by streaming; parts of one run give the bytes of a run without parts.

    Parameters
    ----------
    prefixes : of the corpora, without `.bin`; all of one dtype and, where it is known, one tokenizer
    output : prefix of the joined corpus; must differ from all of them
    """
    if not prefixes:
        raise ValueError("merge needs one corpus or more; got none")
    if Path(output).absolute() in {Path(p).absolute() for p in prefixes}:
        raise ValueError(f"the output must have a name of its own; {output} is one of the inputs")
    indices = [Index.open(p) for p in prefixes]
    kinds = {i.dtype.name for i in indices}
    if len(kinds) > 1:
        raise ValueError(
            f"corpora to merge must have one dtype; got {', '.join(sorted(kinds))}; preprocess with --dtype"
        )
    metas = [read_meta(p) for p in prefixes]
    hashes = {m["tokenizer_sha256"]: p for m, p in zip(metas, prefixes) if "tokenizer_sha256" in m}
    if len(hashes) > 1:
        raise ValueError(f"corpora to merge must have one tokenizer; {' and '.join(hashes.values())} differ")
    for index in indices:
        index.require_whole_bin()
    _make_folder(output)
    parts = {name: Path(f"{output}.{name}.part") for name in ("bin", "lengths", "counts", "idx")}
    with _disk_errors(output):
        try:
            _join(indices, parts, progress)
            idx_path(output).unlink(missing_ok=True)  # an older corpus: its index must not meet the new tokens
            fsync_replace(parts["bin"], bin_path(output))
            fsync_replace(parts["idx"], idx_path(output))
        finally:
            for path in parts.values():
                path.unlink(missing_ok=True)
    if all(metas):
        counts = ("documents", "blank_lines", "skipped", "empty_documents", "tokens")
        total = {name: sum(m[name] for m in metas) for name in counts}
        meta = {**metas[0], **total, "inputs": [row for m in metas for row in m["inputs"]]}
        meta_path(output).write_text(json.dumps(meta, indent=1) + "\n")
    return Index.open(output)


def _join(indices: list[Index], parts: dict[str, Path], progress: bool) -> None:
    block = 1 << 18  # sequences or documents at a time
    with (
        open(parts["bin"], "wb") as tokens,
        open(parts["lengths"], "wb") as lengths,
        open(parts["counts"], "wb") as counts,
    ):
        for index in tqdm(indices, desc="merge", unit="part", disable=not progress):
            with open(bin_path(index.prefix), "rb") as f:
                shutil.copyfileobj(f, tokens, 8 << 20)
            for start in range(0, index.num_sequences, block):
                lengths.write(index.lengths[start : start + block].tobytes())
            for start in range(0, index.num_documents, block):
                bounds = index.documents[start : start + block + 1]
                counts.write(np.diff(bounds).astype(np.int32).tobytes())
    with open(parts["idx"], "wb") as f:
        write_index(f, indices[0].dtype, parts["lengths"], parts["counts"])
