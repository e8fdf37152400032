"""Ids, back end and speed of `dfm text preprocess` for each kind of tokenizer that people use.

    python scripts/fetch_text.py data/text
    python benchmarks/text_tokenizers.py data/text/*.jsonl [--megabytes 4]

The tokenizers have the published configuration (tests/text/text_tokenizers.py) and a vocabulary trained here on a part
of the text. Each preprocesses a JSONL of odd texts, with every character beyond ASCII as an escape and again as UTF-8,
with lone surrogates and with 10 MB without a space, once with the back end that dfm chooses and once with `tokenizers`;
.bin and .idx are compared. Speeds are of encoding alone, in MB of UTF-8 for each CPU second of one process. Results go
to text_tokenizers.{json,md}.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

if (ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, ROOT)

from benchmarks import report
from dfm_nb.text.corpus import PreprocessConfig, preprocess
from dfm_nb.text.encode import encoder
from tests.text.text_tokenizers import ODD_TEXTS, build, sample_text, save, spec_of

KINDS = {
    "gpt2": "GPT-2",
    "llama3": "Llama 3",
    "qwen": "Qwen 2 and 3",
    "o200k": "GPT-4o (o200k)",
    "deepseek": "DeepSeek V3",
    "llama2": "Llama 2: SentencePiece BPE, byte fallback",
    "mistral": "Mistral: the same with Metaspace",
    "gemma": "Gemma: the same, split at spaces",
    "unigram": "SentencePiece Unigram",
    "wordpiece": "BERT: WordPiece",
}
BACKENDS = ("gigatoken", "tokenizers")
LONE = [r'{"text": "a \ud83d b"}', r'{"text": "\ude00"}', r'{"text": "e\u0301\udc00"}']
"""Lines with half of a surrogate pair, which is not a character: no text, so each is skipped."""


def alone(description: str, texts: list[str], want: list[list[int]]) -> str:
    """How many texts gigatoken encodes otherwise, used without dfm."""
    from gigatoken.gigatoken_rs import load_hf_json

    try:
        encode = load_hf_json(description).encode
    except RuntimeError:
        return "refuses it"
    return f"{sum(encode(text).tolist() != ids for text, ids in zip(texts, want))} of {len(texts)}"


def measure(kind: str, work: Path, texts: list[str], odd: list[str]) -> dict:
    tokenizer = build(kind, 8000, texts[:: max(1, len(texts) // 300)])
    folder, spec = save(tokenizer, work / kind), spec_of(tokenizer)
    want = [e.ids for e in tokenizer.encode_batch_fast(odd, add_special_tokens=False)]
    row = {"kind": kind, "vocab_size": spec.vocab_size, "alone": alone(spec.description, odd, want), "speed": {}}
    flags = {"input": (str(work / "odd.jsonl"),), "tokenizer_model": str(folder), "on_error": "skip", "progress": False}
    outputs = []
    for asked in ("tokenizers", "auto"):
        made = preprocess(PreprocessConfig(output_prefix=str(work / asked), tokenizer_backend=asked, **flags))
        outputs.append([Path(f"{work / asked}_text_document.{end}").read_bytes() for end in ("bin", "idx")])
        row |= {"backend": made.tokenizer_backend, "skipped": made.skipped, "documents": made.documents}
        if made.tokenizer_backend not in row["speed"]:
            encode, begun = encoder(spec, made.tokenizer_backend), time.process_time()
            for first in range(0, len(texts), 256):
                encode(texts[first : first + 256])
            megabytes = sum(len(t.encode()) for t in texts) / 1e6
            row["speed"][made.tokenizer_backend] = megabytes / (time.process_time() - begun)
    return row | {"equal": outputs[0] == outputs[1]}


def text(result: dict) -> str:
    rows = []
    for r in result["rows"]:
        speeds = [f"{r['speed'][b]:.1f}" if b in r["speed"] else "-" for b in BACKENDS]
        same = "equal" if r["equal"] else "DIFFERENT"
        rows.append([KINDS[r["kind"]], r["backend"], *speeds, r["alone"], same])
    head = "tokenizer|dfm encodes with|gigatoken, MB/s|tokenizers, MB/s|gigatoken alone differs in|bytes".split("|")
    parts = [
        f"Encoding alone, in one process: {result['mb']:.1f} MB of text by CPU seconds, a vocabulary of up to 8,000 "
        "trained on a part of it. gigatoken's figure has the load of its tokenizer and the comparison of the first 256 "
        "texts with `tokenizers`, which on so little text is most of it; text_fast_path.md has whole runs. "
        f"{report.sentence(result['machine'])}.",
        report.table(head, rows),
        f"Bytes: .bin and .idx of `dfm text preprocess` with its own choice and with `tokenizers`. The input has "
        f"{result['odd']} odd texts (combining marks, NFC, NFD, emoji with joiners, Hangul, right to left, NUL, "
        "special tokens in the text, random mixtures) with escapes and again as UTF-8, and "
        f"{result['long_mb']:.0f} MB of text without a space. {len(LONE)} more lines have a lone surrogate and are "
        "skipped by both. gigatoken alone: without dfm, on the odd texts; where it differs, dfm gives the text to "
        "`tokenizers`.",
    ]
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__, megabytes=(4.0, "of text for the speed"), long_megabytes=10.0)
    parser.add_argument("input", nargs="+", type=Path, help="JSONL files, as scripts/fetch_text.py writes them")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    args = parser.parse_args(argv)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts: list[str] = []
    for path in args.input:
        left = args.megabytes * 1e6 / len(args.input)
        with open(path, encoding="utf-8") as lines:
            while left > 0 and (line := lines.readline()):
                texts.append(json.loads(line)["text"])
                left -= len(texts[-1].encode())
    odd = ODD_TEXTS + [sample_text(seed, foreign=0.03 * (seed % 3), odd=0.04 * (seed % 4)) for seed in range(300)]
    long = "".join("".join(texts).split())
    long = (long * (1 + int(args.long_megabytes * 1e6) // len(long)))[: int(args.long_megabytes * 1e6)]
    result = {"machine": report.machine(), "mb": sum(len(t.encode()) for t in texts) / 1e6, "odd": len(odd)}
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        lines = [json.dumps({"text": t}, ensure_ascii=e) for e in (True, False) for t in odd]
        (work / "odd.jsonl").write_text("\n".join([*lines, *LONE, json.dumps({"text": long})]) + "\n", encoding="utf-8")
        rows = []
        for kind in args.kinds:
            rows.append(measure(kind, work, texts, odd))
            print(rows[-1], flush=True)
    result |= {"rows": rows, "long_mb": len(long.encode()) / 1e6}
    report.save("text_tokenizers", result, text(result), args.output_dir)
    return int(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
