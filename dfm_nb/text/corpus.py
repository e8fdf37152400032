"""JSONL text to Megatron `.bin/.idx`: `preprocess`, and `merge` of its parts.

For each key `<prefix>_<key>_document.bin`, `.idx` and `.meta.json` (tokenizer, EOD id, counts, inputs) are written.
`.bin` and `.idx` are byte for byte what Megatron-LM's tools/preprocess_data.py writes, whatever the number of workers.
The final names appear only when the files are complete. A killed run resumes from its last chunk when it is started
again with the same flags, and the output has the same bytes. Memory is a few chunks (1 MiB each) per worker, whatever
the size of the corpus.
"""

import contextlib
import glob
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from dfm_nb.base.log import log, tqdm
from dfm_nb.text import encode as text_encode
from dfm_nb.text import input as text_input
from dfm_nb.text import tokenizer as text_tokenizer
from dfm_nb.text.check import require_alike, sound
from dfm_nb.text.chunk import COUNTS, ChunkEncoder, Encoded, PreprocessConfig
from dfm_nb.text.indexed import Index, optimal_dtype, read_meta
from dfm_nb.text.input import LineChunk, Position, Span
from dfm_nb.text.parts import SKIPPED, Parts
from dfm_nb.text.workers import ordered_map

PARTITION_ENV = (("RANK", "WORLD_SIZE"), ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"))


@dataclass
class PreprocessResult:
    """What was written, by key, and what happened to the lines."""

    prefixes: dict[str, str]
    tokens: dict[str, int]
    empty_documents: dict[str, int]
    resumed_documents: int
    skipped_path: str | None
    warnings: list[str]
    tokenizer_backend: str
    documents: int
    blank_lines: int
    skipped: int


def part_of(text: str | None) -> tuple[int, int]:
    """`i/n`, counted from 0; None: all. `auto`: what torchrun or a Job gives this process.

    Raises
    ------
    ValueError : another form, or None where the environment has several processes, which would all write the whole
    """
    if text is None:
        if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":  # alone, a RANK that was left is no part
            got = f"RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']}"
            fix = "use --partition auto for this process's part, or --partition 0/1 for everything"
            raise ValueError(f"--partition must be given where the environment has {got}; {fix}")
        return 0, 1
    if text == "auto":
        pairs = []
        for index, count in PARTITION_ENV:
            if index in os.environ and count in os.environ:
                pairs.append(f"{os.environ[index]}/{os.environ[count]}")
        # last "0/1": an image may set WORLD_SIZE=1 for a Job
        text = min(pairs, key=lambda pair: pair.endswith("/1"), default=text)
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match:
        names = " or ".join(" and ".join(pair) for pair in PARTITION_ENV)
        raise ValueError(f"--partition must be i/n, such as 0/4, or auto, which needs {names}; got {text}")
    return int(match[1]), int(match[2])


def preprocess(config: PreprocessConfig) -> PreprocessResult:
    """Tokenize JSONL into an indexed corpus.

    Raises
    ------
    ValueError : bad flags or input; with on_error "stop" the first bad line, by file and number
    FileNotFoundError : an input that does not exist
    """
    try:
        return _preprocess(config)
    except text_encode.OtherIds as error:
        if config.tokenizer_backend != "auto" or text_input.STDIN in config.input:
            raise ValueError(f"{error}; use --tokenizer-backend tokenizers") from None
        result = _preprocess(config.replace(tokenizer_backend="tokenizers"))
        result.warnings.append(f"{error}; so all was encoded again by tokenizers")
        return result


def _preprocess(config: PreprocessConfig) -> PreprocessResult:
    for key in config.json_keys:
        if "/" in key:
            raise ValueError(f"--json-keys become names of files, so without /; got {key}")
    paths = text_input.expand_inputs(list(config.input), config.output_prefix)
    part, num_parts = part_of(config.partition)
    spans = text_input.partition(paths, part, num_parts)
    spec = text_tokenizer.load(config.tokenizer_model)
    dtype = np.dtype(config.dtype) if config.dtype else optimal_dtype(spec.vocab_size)
    spec.check(dtype, config.append_eod)
    prefix = _part_prefix(config.output_prefix, part, num_parts)
    prefixes = {key: f"{prefix}_{key}_document" for key in config.json_keys}
    backend = "tokenizers"
    signature = {
        "state": 5,  # of the part files and their progress
        "inputs": text_input.fingerprint(spans),
        "tokenizer": [spec.sha256, spec.eod_id],
        "settings": [list(config.json_keys), dtype.name, config.append_eod],
        "backend": backend,
    }
    if config.tokenizer_backend != "auto" or Parts.signature_of(prefix) != signature:  # otherwise it was begun again
        signature["backend"] = backend = text_encode.choose(spec, config.tokenizer_backend)
    config = config.replace(dtype=dtype.name, tokenizer_backend=backend)
    with Parts.open(prefix, prefixes, signature) as parts:
        done = parts.progress
        resumed = done.counts["documents"]
        source = text_input.chunks(spans, config.chunk_size, done.at, config.chunk_bytes)
        with contextlib.closing(ordered_map(ChunkEncoder, (spec, config), source, config.workers)) as results:
            _write(config, spans, results, parts)
        # An input without a document is an error; an empty part is not.
        if done.counts["documents"] == 0 and num_parts == 1:
            raise ValueError(f"--input must contain a document; {', '.join(paths)} has none ({done.counts})")
        meta: dict[str, Any] = {
            "tokenizer": spec.name,
            "tokenizer_sha256": spec.sha256,
            "vocab_size": spec.vocab_size,
            "max_id": spec.max_id,
            "eod_id": spec.eod_id,
            "append_eod": config.append_eod,
            "dtype": dtype.name,
            "tokenizer_backend": backend,
            "inputs": list(map(asdict, spans)),
        }
        if num_parts > 1:
            meta["part"] = f"{part}/{num_parts}"
            meta["listing_sha256"] = text_input.listing_sha256(paths)
        parts.finish(dtype, meta | done.counts)
    tokens = {}
    warnings = []
    for key in prefixes:
        tokens[key] = done.sizes[f"{key}.bin"] // dtype.itemsize
        if done.counts["documents"] and not tokens[key]:
            warnings.append(f"every text under {key!r} is empty: {prefixes[key]}.bin has no token")
    return PreprocessResult(prefixes, tokens, done.empty, resumed, parts.skipped_path, warnings, backend, **done.counts)


def _write(
    config: PreprocessConfig, spans: list[Span], results: Iterator[tuple[LineChunk, Encoded]], parts: Parts
) -> None:
    """Append the chunks to the part files; with on_error "stop" ValueError names the first bad line."""
    done = parts.progress
    # The bar counts bytes of text; a compressed file's size is not known before it is read.
    total = None
    if not any(span.path == text_input.STDIN or text_input.is_compressed(span.path) for span in spans):
        total = sum((span.end or text_input.size(span.path)) - span.start for span in spans)
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenize", disable=not config.progress) as bar:
        for chunk, encoded in results:
            span = spans[chunk.end.span]
            before = text_input.lines_before(span) if encoded.bad else 0
            bad = [{"file": span.path, **row, "line": before + row["line"]} for row in encoded.bad]
            if bad and config.on_error == "stop":
                fault = "{file}, line {line}: {reason}; it begins {excerpt!r}".format(**bad[0])
                raise ValueError(f"{fault}; correct it, or skip such lines with --on-error skip")
            for key, arrays in encoded.corpora.items():
                parts.append(key, *arrays)
            parts.write(SKIPPED, b"".join(json.dumps(record).encode() + b"\n" for record in bad))
            done.at = chunk.end
            done.counts = {name: n + encoded.counts[name] for name, n in done.counts.items()}
            if done.counts["documents"]:  # otherwise there is nothing to keep
                parts.save()
            bar.update(sum(map(len, chunk.lines)))


def _part_prefix(prefix: str, index: int, count: int) -> str:
    """`<prefix>` of one run, or of part `index` of `count`."""
    return prefix if count == 1 else f"{prefix}_part{index:05d}-of-{count:05d}"


def find_parts(prefix: str, key: str = "text") -> list[str]:
    """The prefixes of all parts that `preprocess` wrote for `prefix`, in order.

    Raises
    ------
    FileNotFoundError : there are none, or one is missing
    """
    pattern = f"{glob.escape(prefix)}_part?????-of-?????_{key}_document.idx"
    existing = {path.removesuffix(".idx") for path in glob.glob(pattern)}
    if not existing:
        raise FileNotFoundError(f"there are no parts {prefix}_part00000-of-0000n_{key}_document")
    count = int(min(existing)[len(f"{prefix}_part00000-of-") :][:5])
    parts = [f"{_part_prefix(prefix, i, count)}_{key}_document" for i in range(count)]
    different = existing.symmetric_difference(parts)
    if different:
        fault = f"{min(different)} is missing or of another run"
        raise FileNotFoundError(f"all {count} parts of one run are needed; {fault}")
    return parts


def merge(prefixes: list[str], output: str, progress: bool = True) -> Index:
    """Join corpora in the given order by streaming; parts of one run give the bytes of a run without parts.

    Parameters
    ----------
    prefixes : of the corpora, without `.bin`; all must be alike (`check.alike`); what is unknown is reported
    output : prefix of the joined corpus; must differ from all of them

    A killed merge resumes when it is called again with the same corpora, at the first that was not yet joined. One
    corpus is mapped at a time, so memory does not grow with their number.
    """
    if not prefixes:
        raise ValueError("merge needs one corpus or more; got none")
    if Path(output).absolute() in {Path(p).absolute() for p in prefixes}:
        raise ValueError(f"the output must have a new name; {output} is one of the inputs")
    for prefix in prefixes:
        sound(prefix)
    for unknown in require_alike(prefixes):
        log.warning("merge cannot compare all: %s", unknown)
    metas = [read_meta(p) for p in prefixes]
    key = metas[0].get("key", "text")
    # A hash, because the state is written often and there may be thousands of parts.
    signature = {"merge": 2, "inputs": [text_input.corpora_sha256(prefixes)]}
    with Parts.open(output, {key: output}, signature) as parts:
        done = parts.progress
        for prefix in tqdm(prefixes[done.at.span :], desc="merge", unit="part", disable=not progress):
            index = Index.open(prefix)
            parts.append(key, index.tokens(), index.lengths, np.diff(index.documents).astype(np.int32))
            done.at = Position(done.at.span + 1)
            parts.save()
        meta = None
        if all(metas):
            meta = metas[0]
            meta.pop("part", None)
            for other in metas[1:]:
                meta["inputs"] += other["inputs"]
                for name in COUNTS:
                    meta[name] += other[name]
        parts.finish(Index.open(prefixes[0]).dtype, meta)
    return Index.open(output)
