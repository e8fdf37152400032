"""Download real English text as JSONL: WordNet's glosses, Python's manual, package descriptions, docstrings.

Writes DIR/wordnet.jsonl, python_docs.jsonl, packages.jsonl and docstrings.jsonl: one object per line, with `text` and
`source`.

    python scripts/fetch_text.py data/text [--only wordnet python_docs] [--max-megabytes 30]

`wordnet` (Debian's wordnet-base) and `python_docs` (Debian's python3-doc, the reStructuredText sources) need apt-get;
`packages` (descriptions of installed packages) and `docstrings` (the standard library and site-packages) come from the
Python that runs this. Texts are sorted and unique, so the same machine gives the same files.

Then: dfm text preprocess --input data/text/wordnet.jsonl --output-prefix data/corpora/wordnet --tokenizer-model ...
"""

import argparse
import ast
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Iterator

MIN_CHARS = 80  # a shorter docstring is a label, not a text


def fetched(command: list[str], folder: Path) -> Path:
    """The archive that a program downloads into `folder`; on failure the script ends with one sentence."""
    program, *_, package = command
    folder.mkdir(parents=True)
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(f"error: {program} is needed to fetch {package}; install it, or leave this out") from None
    archive = next(folder.iterdir(), None)
    if done.returncode or archive is None:
        said = " ".join(done.stderr.split())[-300:] or "no reason given"
        advice = "check the network; for apt-get, run apt-get update first"
        raise SystemExit(f"error: {program} could not fetch {package}: {said}; {advice}")
    return archive


def debian_files(package: str, folder: Path) -> Path:
    """Download a Debian package and unpack it under `folder`, installing nothing."""
    archive = fetched(["apt-get", "download", package], folder)
    subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=folder, check=True)
    return folder


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The arguments of a script that fetches: its docstring, and the folder to write to."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder; created if missing")
    return parser


def wordnet(folder: Path) -> Iterator[tuple[str, str]]:
    """Each gloss of WordNet: the text after the bar in data.noun, data.verb, data.adj, data.adv."""
    for path in sorted(debian_files("wordnet-base", folder / "wordnet").rglob("data.*")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("  ") and " | " in line:
                yield path.name, line.split(" | ", 1)[1].strip()


def python_docs(folder: Path) -> Iterator[tuple[str, str]]:
    """Each page of Python's manual, as source (reStructuredText)."""
    # python3-doc has no pages: it depends on the package of the release's Python.
    said = subprocess.run(["apt-cache", "depends", "python3-doc"], capture_output=True, text=True).stdout
    package = next(iter(re.findall(r"Depends: (python3\.\d+-doc)", said)), "python3-doc")
    pages = sorted(debian_files(package, folder / "python").rglob("_sources/**/*.txt"))
    if not pages:
        raise SystemExit(f"error: {package} has no _sources; leave it out: --only wordnet packages docstrings")
    for path in pages:
        yield path.name, path.read_text(encoding="utf-8").strip()


def packages(_: Path) -> Iterator[tuple[str, str]]:
    """The description of each installed package."""
    found = {d.metadata["Name"] or "": d for d in importlib.metadata.distributions()}
    for name in sorted(found, key=str.lower):
        text = found[name].metadata.get_payload() or found[name].metadata.get("Description") or ""
        if isinstance(text, str):
            yield name, text.strip()


def docstrings(_: Path) -> Iterator[tuple[str, str]]:
    """Docstrings of modules, classes and functions, file by file."""
    roots = [Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib")]
    for path in (p for root in roots for p in sorted(root.rglob("*.py"))):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if len(text) >= MIN_CHARS:
                    yield path.name, text


SOURCES = {"wordnet": wordnet, "python_docs": python_docs, "packages": packages, "docstrings": docstrings}


def write(path: Path, rows: Iterator[tuple[str, str]], limit: float) -> tuple[int, int]:
    """Write each text once, up to `limit` characters: (documents, characters)."""
    seen: set[bytes] = set()
    documents = size = 0
    temporary = path.with_suffix(".part")
    with open(temporary, "w", encoding="utf-8") as f:
        for source, text in rows:
            data = text.encode("utf-8", "replace")
            key = hashlib.md5(data, usedforsecurity=False).digest()
            if not text or key in seen:
                continue
            seen.add(key)
            f.write(json.dumps({"text": data.decode(), "source": source}) + "\n")
            documents, size = documents + 1, size + len(text)
            if size >= limit:
                break
    temporary.replace(path)
    return documents, size


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SOURCES), default=list(SOURCES), help="texts to write")
    parser.add_argument("--max-megabytes", type=float, default=float("inf"), help="maximum size of each")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.only:
            rows = SOURCES[name](Path(temporary))
            documents, size = write(args.folder / f"{name}.jsonl", rows, args.max_megabytes * 1e6)
            print(f"{args.folder / name}.jsonl: {documents:,} documents, {size / 1e6:.1f} M characters", flush=True)


if __name__ == "__main__":
    main()
