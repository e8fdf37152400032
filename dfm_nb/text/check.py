"""The contents of a `.bin/.idx` corpus (`inspect`), and whether it is valid (`verify`).

`inspect` reads the index, a sample of tokens and a few documents; `verify` reads every token. A check that could not
run is reported as such and does not count as passed.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dfm_nb.base.log import tqdm
from dfm_nb.text import tokenizer as text_tokenizer
from dfm_nb.text.indexed import VERSION, Index, bin_path, idx_path, meta_path, read_meta
from dfm_nb.text.input import expand_inputs, open_input

_BLOCK_TOKENS = 4 << 20
_SAMPLE_TOKENS = 20_000_000  # np.unique sorts them: seconds, and some hundred MB
ONE_EOD = "one way to end documents"
_PERCENTILES = [0, 1, 5, 25, 50, 75, 95, 99, 100]


def _tokenizer(prefix: str | Path, model: str | None) -> text_tokenizer.TokenizerSpec | None:
    """The requested tokenizer, or the one that the corpus was written with if it can still be found."""
    if model is not None:
        return text_tokenizer.load(model)
    name = read_meta(prefix).get("tokenizer")
    return text_tokenizer.load(name) if name and Path(name).exists() else None


def inspect(prefix: str | Path, tokenizer_model: str | None = None, documents: int = 3) -> dict:
    """Counts, lengths in tokens, the first documents decoded and the most frequent tokens.

    Returns
    -------
    dict, ready for JSON. `length_percentiles` are document lengths in tokens; `frequent_tokens` are rows of id, text,
    count and share, from the first 20 million tokens. A `text` is None if the tokenizer is unknown.
    """
    index = sound(prefix)
    meta = read_meta(prefix)
    spec = _tokenizer(prefix, tokenizer_model)
    backend = spec.backend() if spec else None

    def text(ids: list[int]) -> str | None:
        return backend.decode(ids, skip_special_tokens=False) if backend else None

    tokens = index.tokens()
    lengths = index.document_tokens()
    first_documents = []
    start = 0
    for number, length in enumerate(lengths[:documents].tolist()):
        ids = tokens[start : start + min(200, length)].tolist()
        first_documents.append({"document": number, "tokens": length, "ids": ids[:20], "text": text(ids)})
        start += length
    values, counts = np.unique(tokens[:_SAMPLE_TOKENS], return_counts=True)
    frequent_tokens = []
    top = np.argsort(-counts, kind="stable")[:20]
    for value, count in zip(values[top].tolist(), counts[top].tolist()):
        share = float(count / counts.sum())
        frequent_tokens.append({"id": value, "text": text([value]), "count": count, "share": share})
    some = lengths if len(lengths) else np.zeros(1)
    return {
        "prefix": str(prefix),
        "version": VERSION,
        "dtype": index.dtype.name,
        "sequences": len(index.lengths),
        "documents": index.num_documents,
        "empty_documents": int((lengths == 0).sum()),
        "tokens": index.num_tokens,
        "bin_bytes": bin_path(prefix).stat().st_size,
        "idx_bytes": idx_path(prefix).stat().st_size,
        "distinct_tokens": len(values),
        "mean_length": float(some.mean()),
        "length_percentiles": dict(zip(map(str, _PERCENTILES), np.percentile(some, _PERCENTILES).tolist())),
        "tokenizer": meta.get("tokenizer"),
        "eod_id": meta.get("eod_id"),
        "append_eod": meta.get("append_eod"),
        "frequent_tokens": frequent_tokens,
        "first_documents": first_documents,
    }


def report_text(report: dict) -> str:
    """`inspect`'s result as text."""
    percentiles = ", ".join(f"{k} % {v:g}" for k, v in report["length_percentiles"].items())
    head = (
        "{prefix}: {documents:,} documents ({empty_documents:,} empty), {sequences:,} sequences, {tokens:,} tokens "
        "({dtype}, version {version}, {bin_bytes:,} bytes)\n"
        "tokenizer {tokenizer}; EOD {eod_id}; append_eod {append_eod}\n"
        "tokens per document: mean {mean_length:.1f}; {percentiles}\n"
        "{distinct_tokens:,} different tokens; the most frequent:"
    )
    lines = [head.format(**report, percentiles=percentiles)]
    for row in report["frequent_tokens"]:
        lines.append("  {id:>7} {count:>12,} {share:7.2%}  {text!r}".format(**row))
    for row in report["first_documents"]:
        shown = row["text"] or f"ids {row['ids']}"
        lines.append(f"document {row['document']} ({row['tokens']} tokens): {shown[:300]!r}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Check:
    """One line of the checklist. `passed` None: it could not run, and `detail` has the reason."""

    name: str
    passed: bool | None
    detail: str


def verify(
    prefix: str | Path,
    tokenizer_model: str | None = None,
    append_eod: bool | None = None,
    inputs: list[str] | None = None,
    progress: bool = True,
) -> list[Check]:
    """The checklist for one corpus.

    Parameters
    ----------
    tokenizer_model : to check token ids and the EOD against; None: the recorded one
    append_eod : whether each document must end with the EOD; None: as recorded
    inputs : JSONL files or globs whose documents are counted
    """
    files = (bin_path(prefix), idx_path(prefix))
    sizes = [path.stat().st_size if path.is_file() else 0 for path in files]
    detail = ", ".join(f"{path.name} {size:,} bytes" for path, size in zip(files, sizes))
    checks = [Check("both files are there and not empty", all(sizes), detail)]
    try:
        index = Index.open(prefix)
    except (ValueError, FileNotFoundError) as error:
        return [*checks, Check("the index can be read", False, str(error))]
    checks.append(Check("the index can be read", True, f"version {VERSION}, {index.dtype.name}"))
    checks += _structure(index)
    if not all(c.passed for c in checks):
        return [*checks, Check("the tokens are valid", None, "not read, because the index is damaged")]
    meta = read_meta(prefix)
    spec = _tokenizer(prefix, tokenizer_model)
    if append_eod is None:
        append_eod = meta.get("append_eod")
    return [
        *checks,
        _ids(index, spec.max_id if spec else meta.get("max_id"), progress),
        _ends(index, spec.eod_id if spec else meta.get("eod_id"), append_eod),
        _made_with(spec, meta, prefix),
        _count(index, meta, inputs),
    ]


def _structure(index: Index) -> list[Check]:
    size = bin_path(index.prefix).stat().st_size
    want = index.num_tokens * index.dtype.itemsize
    lengths = index.lengths.astype(np.int64)
    wrong = np.flatnonzero((np.cumsum(lengths) - lengths) * index.dtype.itemsize != index.pointers)
    bounds = index.documents
    rising = bool((np.diff(bounds) >= 0).all())
    ends = [int(bounds[i]) for i in (0, -1)] if len(bounds) else []
    return [
        Check("the sizes agree", size == want, f".bin has {size:,} bytes, the index needs {want:,}"),
        Check("every sequence has tokens", bool((lengths > 0).all()), f"{int((lengths <= 0).sum())} have none"),
        Check("the pointers follow the lengths", not len(wrong), f"wrong: {wrong[:3].tolist() or 'none'}"),
        Check("the document bounds rise", rising and ends == [0, len(lengths)], f"{ends} of {len(lengths)} sequences"),
    ]


def sound(prefix: str | Path) -> Index:
    """The index of a corpus; ValueError if its sizes, pointers or documents do not fit."""
    index = Index.open(prefix)
    for check in _structure(index):
        if not check.passed:
            raise ValueError(f"{prefix}: {check.name} must hold; {check.detail}; copy it again")
    return index


def _ids(index: Index, max_id: int | None, progress: bool) -> Check:
    tokens = index.tokens()
    top = -1
    low = 0
    for start in tqdm(range(0, len(tokens), _BLOCK_TOKENS), desc="verify", unit="block", disable=not progress):
        block = tokens[start : start + _BLOCK_TOKENS]
        top = max(top, int(block.max()))
        low = min(low, int(block.min()))
    passed = None if max_id is None else 0 <= low and top <= max_id
    return Check("token ids are in the vocabulary", passed, f"ids up to {top}; the vocabulary's largest is {max_id}")


def _ends(index: Index, eod: int | None, append_eod: bool | None) -> Check:
    name = "documents end with EOD"
    if not append_eod:
        return Check(name, None, "not requested (--append-eod)")
    sizes = index.document_tokens()
    last = np.cumsum(sizes)[sizes > 0] - 1  # of each document that is not empty: they are contiguous
    wrong = len(last) if eod is None else int((index.tokens()[last] != eod).sum())
    return Check(name, not wrong, f"{wrong:,} of {len(last):,} do not; the tokenizer's EOD is {eod}")


def _made_with(spec: text_tokenizer.TokenizerSpec | None, meta: dict, prefix: str | Path) -> Check:
    name = "made with this tokenizer"
    record = meta_path(prefix)
    if not meta:
        if record.exists():
            return Check(name, False, f"{record.name} is not of these files")
        return Check(name, None, f"{record.name} is missing")
    if not spec:
        return Check(name, None, f"{meta['tokenizer']} is not on this machine; give --tokenizer-model")
    detail = f"recorded: {meta['tokenizer']}; compared with: {spec.name}"
    return Check(name, spec.sha256 == meta["tokenizer_sha256"], detail)


def _count(index: Index, meta: dict, inputs: list[str] | None) -> Check:
    name = "all documents of the JSONL are there"
    documents = index.num_documents
    if inputs:
        want = -meta.get("skipped", 0)
        for path in expand_inputs(inputs):
            with open_input(path) as f:
                want += sum(1 for line in f if line.strip())
        source = "in --input, without skipped lines"
    elif meta:
        want = meta["documents"]
        source = "recorded"
    else:
        return Check(name, None, f"{documents:,} documents; give --input to count")
    return Check(name, want == documents, f"{documents:,} documents; {want:,} {source}")


def alike(prefixes: list[str]) -> list[Check]:
    """Whether corpora can be used together, by what each of them records; `passed` None: one records nothing.

    Parts of one run must also be of one list of files, so that no file is in two parts or in none.
    """
    compared = defaultdict[tuple[str, str], dict[str, str | None]](dict)  # by the check's name, and a run's
    for prefix in prefixes:
        meta = read_meta(prefix)
        compared["one dtype", ""][prefix] = Index.open(prefix).dtype.name
        compared["one tokenizer", ""][prefix] = f"tokenizer_sha256 {meta['tokenizer_sha256'][:12]}" if meta else None
        compared[ONE_EOD, ""][prefix] = f"append_eod {meta['append_eod']}" if meta else None
        match = re.fullmatch(r"(.*)_part(\d{5})-of-(\d{5})(_.*)", str(prefix))
        if match:
            run, index, count, key = match.groups()
            origin = f"listing_sha256 {str(meta.get('listing_sha256'))[:12]}"
            origin += f", tokenizer_backend {meta.get('tokenizer_backend')}, part {meta.get('part')}"
            # without its own number, so that a part under the number of another one differs from all others
            origin = origin.removesuffix(f", part {int(index)}/{int(count)}")
            compared["parts of one list of files", f"{run}\0{key}"][prefix] = origin if "part" in meta else None
    return [_same(name, values) for (name, _), values in compared.items()]


def _same(name: str, values: dict[str, str | None]) -> Check:
    """Whether all corpora have one of these values by prefix, None where it is unknown."""
    last = {value: prefix for prefix, value in values.items()}
    unknown = last.pop(None, None)
    if len(last) > 1:
        return Check(name, False, " and ".join(f"{value} in {prefix}" for value, prefix in last.items()))
    if unknown:
        return Check(name, None, f"no .meta.json of {unknown} records it")
    return Check(name, True, f"{', '.join(map(str, last))} in {len(values)} corpora")


def require_alike(prefixes: list[str], but: str | None = None) -> list[str]:
    """What differs in the check named `but`, or is unknown; ValueError for any other difference."""
    checks = alike(prefixes)
    failed = [check for check in checks if check.passed is False and check.name != but]
    if failed:
        fix = "preprocess them with the same flags and files"
        raise ValueError(f"the corpora need {failed[0].name}; got {failed[0].detail}; {fix}")
    return [f"{check.name}: {check.detail}" for check in checks if not check.passed]
