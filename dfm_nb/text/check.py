"""What a `.bin/.idx` corpus holds (`inspect`) and whether it is sound (`verify`).

`inspect` reads the index, a sample of tokens and a few documents; `verify` reads every token. A check that could not be
made says so and does not count as passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dfm_nb.base.progress import tqdm
from dfm_nb.text import tokenizer as text_tokenizer
from dfm_nb.text.indexed import VERSION, Index, bin_path, idx_path, read_meta
from dfm_nb.text.input import expand_inputs, open_input
from dfm_nb.text.tokenizer import TokenizerSpec

_BLOCK_TOKENS = 4 << 20
_SAMPLE_TOKENS = 20_000_000
_PERCENTILES = [0, 1, 5, 25, 50, 75, 95, 99, 100]


def _tokenizer(prefix: str | Path, model: str | None) -> TokenizerSpec | None:
    """The tokenizer that was asked for, or the one that made the corpus when it can still be found."""
    if model is not None:
        return text_tokenizer.load(model)
    name = read_meta(prefix).get("tokenizer")
    return text_tokenizer.load(name) if name and Path(name).exists() else None


def inspect(prefix: str | Path, tokenizer_model: str | None = None, documents: int = 3, head: int = 20) -> dict:
    """Counts, lengths in tokens, the first documents decoded and the most frequent tokens.

    Returns
    -------
    dict, ready for JSON. `length_percentiles` are of documents, in tokens; `frequent_tokens` are rows of id, text,
    count and share, from the first 20 million tokens.
    """
    index, meta = Index.open(prefix), read_meta(prefix)
    spec = _tokenizer(prefix, tokenizer_model)
    backend = spec.backend() if spec else None

    def text(ids: list[int]) -> str | None:
        return backend.decode(ids, skip_special_tokens=False) if backend else None

    def document(number: int) -> dict:
        first, last = index.documents[number : number + 2].tolist()
        ids = [int(t) for s in range(first, last) for t in index.sequence(s)[:200]][:200]
        tokens = int(index.lengths[first:last].sum())
        return {"document": number, "tokens": tokens, "ids": ids[:20], "text": text(ids)}

    lengths = index.document_tokens()
    some = lengths if len(lengths) else np.zeros(1)
    tokens = index.tokens()[:_SAMPLE_TOKENS]
    ids, counts = np.unique(tokens, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:head]
    frequent = zip(ids[most].tolist(), counts[most].tolist())
    return {
        "prefix": str(prefix),
        "version": VERSION,
        "dtype": index.dtype.name,
        "sequences": index.num_sequences,
        "documents": index.num_documents,
        "empty_documents": int((lengths == 0).sum()),
        "tokens": index.num_tokens,
        "bin_bytes": bin_path(prefix).stat().st_size,
        "idx_bytes": idx_path(prefix).stat().st_size,
        "distinct_tokens": len(ids),
        "mean_length": float(some.mean()),
        "length_percentiles": dict(zip(map(str, _PERCENTILES), np.percentile(some, _PERCENTILES).tolist())),
        "tokenizer": meta.get("tokenizer"),
        "eod_id": meta.get("eod_id"),
        "append_eod": meta.get("append_eod"),
        "frequent_tokens": [{"id": i, "text": text([i]), "count": n, "share": n / len(tokens)} for i, n in frequent],
        "first_documents": [document(d) for d in range(min(documents, index.num_documents))],
    }


def report_text(report: dict) -> str:
    """`inspect`'s result as lines to read."""
    p = report["length_percentiles"]
    unknown = report["tokenizer"] and any(row["text"] is None for row in report["frequent_tokens"])
    missing = " (not found here: no text is shown; give --tokenizer-model)" if unknown else ""
    lines = [
        f"{report['prefix']}: {report['documents']:,} documents, {report['sequences']:,} sequences, "
        f"{report['tokens']:,} tokens ({report['dtype']}, version {report['version']}, {report['bin_bytes']:,} bytes)",
        f"tokenizer {report['tokenizer'] or 'not recorded'}{missing}; EOD {report['eod_id']}, "
        f"{'appended' if report['append_eod'] else 'not appended'}; empty documents {report['empty_documents']:,}",
        f"tokens a document: mean {report['mean_length']:.1f}; " + ", ".join(f"{k} % {v:g}" for k, v in p.items()),
        f"{report['distinct_tokens']:,} different tokens; the most frequent:",
    ]
    for row in report["frequent_tokens"]:
        lines.append(f"  {row['id']:>7} {row['count']:>12,} {100 * row['share']:6.2f} %  {row['text']!r}")
    for row in report["first_documents"]:
        text = row["text"] if row["text"] is not None else f"ids {row['ids']}"
        lines.append(f"document {row['document']} ({row['tokens']} tokens): {text[:300]!r}")
    return "\n".join(lines)


def histogram(prefix: str | Path, path: str | Path) -> Path:
    """Write a PNG: documents by length in tokens (logarithmic bins), with median and 95 % marked."""
    from matplotlib.figure import Figure

    index = Index.open(prefix)
    lengths = index.document_tokens()
    lengths = lengths[lengths > 0]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    if len(lengths):
        bins = np.unique(np.geomspace(lengths.min(), lengths.max() + 1, 41).round()).tolist()
        axes.hist(lengths, bins=bins, color="#4477aa", edgecolor="white", linewidth=0.4)
        axes.set_xscale("log")
        for value, name, style in ((50, "median", "-"), (95, "95 %", "--")):
            at = float(np.percentile(lengths, value))
            axes.axvline(at, color="#cc3311", linestyle=style, linewidth=1.2, label=f"{name}: {at:,.0f} tokens")
        axes.legend(frameon=False)
    axes.set(xlabel="document length (tokens)", ylabel="documents")
    axes.set_title(f"{Path(prefix).name}: {index.num_documents:,} documents, {index.num_tokens:,} tokens", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(str(path), dpi=130)
    return Path(path)


@dataclass(frozen=True)
class Check:
    """One line of the checklist. `passed` None: it could not be made, `detail` says why."""

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
    tokenizer_model : to check token ids and the EOD against; the recorded one when None
    append_eod : whether each document must end with the EOD; what was recorded when None
    inputs : JSONL files or globs to count the documents of
    """
    checks: list[Check] = []
    sizes = {p.name: p.stat().st_size if p.is_file() else None for p in (bin_path(prefix), idx_path(prefix))}
    detail = ", ".join(f"{name} missing" if n is None else f"{name} {n:,} bytes" for name, n in sizes.items())
    checks.append(Check("both files are there and not empty", all(sizes.values()), detail))
    try:
        index = Index.open(prefix)
    except (ValueError, FileNotFoundError) as error:
        return [*checks, Check("the index can be read", False, str(error))]
    checks.append(Check("the index can be read", True, f"version {VERSION}, {index.dtype.name}"))
    checks += _structure(index)
    if not all(c.passed for c in checks):
        return checks
    meta = read_meta(prefix)
    spec = _tokenizer(prefix, tokenizer_model)
    max_id, eod = (spec.max_id, spec.eod_id) if spec else (meta.get("max_id"), meta.get("eod_id"))
    checks += _tokens(index, max_id, eod, meta.get("append_eod") if append_eod is None else append_eod, progress)
    if spec and tokenizer_model is not None and meta:
        detail = f"recorded: {meta['tokenizer']}; given: {tokenizer_model}"
        checks.append(Check("made with this tokenizer", spec.sha256 == meta["tokenizer_sha256"], detail))
    checks.append(_count(index, meta, inputs))
    return checks


def _structure(index: Index) -> list[Check]:
    size, lengths = bin_path(index.prefix).stat().st_size, index.lengths.astype(np.int64)
    want = int(lengths.sum()) * index.dtype.itemsize
    pointers = (np.cumsum(lengths) - lengths) * index.dtype.itemsize
    wrong = np.flatnonzero(pointers != index.pointers)
    at = f"sequence {wrong[0]}: {index.pointers[wrong[0]]}, not {pointers[wrong[0]]}" if len(wrong) else "all agree"
    bounds = index.documents
    rising = len(bounds) > 0 and bounds[0] == 0 and bool((np.diff(bounds) >= 0).all())
    last, shortest = int(bounds[-1]) if len(bounds) else -1, lengths.min() if len(lengths) else 0
    whole = rising and last == index.num_sequences
    return [
        Check("the sizes agree", size == want, f".bin has {size:,} bytes, the index says {want:,}"),
        Check("every sequence holds tokens", bool((lengths > 0).all()), f"shortest: {shortest}"),
        Check("the pointers follow the lengths", not len(wrong), at),
        Check("the document bounds rise", whole, f"0 to {last} of {index.num_sequences}"),
    ]


def _tokens(index: Index, max_id: int | None, eod: int | None, asked: bool | None, progress: bool) -> list[Check]:
    """Ids within the vocabulary; an EOD at the end of each document that is not empty."""
    tokens, top, low, eods = index.tokens(), -1, 0, 0
    for start in tqdm(range(0, len(tokens), _BLOCK_TOKENS), desc="verify", unit="block", disable=not progress):
        block = tokens[start : start + _BLOCK_TOKENS]
        top, low = max(top, int(block.max())), min(low, int(block.min()))
        if eod is not None:
            eods += int((block == eod).sum())
    ids = Check("token ids lie in the vocabulary", None, f"largest id {top}; give --tokenizer-model")
    if max_id is not None:
        detail = f"ids {low} to {top}; the vocabulary has {max_id + 1:,}"
        ids = Check(ids.name, 0 <= low and top <= max_id, detail)
    name = "documents end with EOD"
    if not asked:
        return [ids, Check(name, None, "not asked for (--append-eod)")]
    if eod is None:
        return [ids, Check(name, False, "the tokenizer has no EOD token")]
    sizes = index.document_tokens()
    last = np.cumsum(sizes)[sizes > 0] - 1  # of each document that is not empty: they lie one behind the other
    if wrong := int((tokens[last] != eod).sum()):
        return [ids, Check(name, False, f"{wrong} of {len(last):,} do not")]
    return [ids, Check(name, True, f"all {len(last):,}; {eods - len(last)} more inside documents")]


def _count(index: Index, meta: dict, inputs: list[str] | None) -> Check:
    name = "the documents of the JSONL are all there"
    if not inputs:
        if not meta:
            return Check(name, None, f"{index.num_documents:,} documents; give --input to count")
        same = meta["documents"] == index.num_documents
        return Check(name, same, f"{index.num_documents:,} documents; recorded {meta['documents']:,}")
    lines = 0
    for path in expand_inputs(inputs):
        with open_input(path) as f:
            lines += sum(1 for line in f if line.strip())
    skipped = meta.get("skipped", 0)
    text = f"{index.num_documents:,} documents; {lines:,} lines, {skipped} of them skipped"
    return Check(name, index.num_documents == lines - skipped, text)


def verify_same_tokenizer(prefixes: list[str]) -> Check:
    """The corpora of a blend must come from one tokenizer, by the hash of its whole definition."""
    name = "one tokenizer over the blend"
    hashes = {p: read_meta(p).get("tokenizer_sha256") for p in prefixes}
    known = {h: p for p, h in hashes.items() if h}
    if len(known) > 1:
        return Check(name, False, " and ".join(known.values()) + " were made with different tokenizers")
    dtypes = {Index.open(p).dtype.name for p in prefixes}
    if len(dtypes) > 1:
        return Check(name, False, f"the corpora have dtypes {', '.join(sorted(dtypes))}")
    if unknown := [p for p, h in hashes.items() if not h]:
        detail = f"no .meta.json beside {', '.join(unknown)}; only the dtype ({dtypes.pop()}) could be compared"
        return Check(name, None, detail)
    return Check(name, True, f"{len(prefixes)} corpora, {read_meta(prefixes[0])['tokenizer']}")


def require_same_tokenizer(prefixes: list[str]) -> Check:
    """The same; ValueError where it fails."""
    same = verify_same_tokenizer(prefixes)
    if same.passed is False:
        raise ValueError(f"the corpora need one tokenizer and one dtype; {same.detail}; preprocess them alike")
    return same
