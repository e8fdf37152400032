"""The budget: code lines per room, compared with `[tool.dfm_nb.budget]` in pyproject.toml.

    python scripts/house_figures.py [--root CHECKOUT] [--record] [--without INTEGRATION]

A code line is not blank, not only a comment and not part of a docstring; `ruff format` decides where lines end, so
dense code gains nothing. The exit code is 1 if a room is above its budget or has none. `--record` adds the row of
docs/log for this checkout: settings, flags and words. `--without wan` lists what goes with dfm_nb/integrations/wan:
files, and lines elsewhere that name it.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

TREES = ("dfm_nb", "workbench", "tests", "benchmarks", "scripts", "examples")


def code_lines(source: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef):  # including strings below constants and fields
            texts = node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            texts = node.body[:1]
        else:
            continue
        for text in texts:
            if (
                isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for i, line in lines if i not in docstrings)


def rooms(root: Path) -> Counter[str]:
    """{room: code lines}; each folder of the package, its verbs together, and each other tree is a room."""
    found: Counter[str] = Counter()
    for tree in TREES:
        for path in (root / tree).rglob("*.py"):
            lines, parts = code_lines(path.read_text(encoding="utf-8")), path.relative_to(root).parts
            found[tree] += lines
            if tree == "dfm_nb":
                depth = 3 if parts[1] == "integrations" and len(parts) > 3 else 2  # each integration is a room
                found["/".join(parts[:depth]) if len(parts) > 2 else "dfm_nb/verbs"] += lines
    return found


def record(root: Path) -> str:
    """Settings, flags of all commands and words of the docs."""

    def printed(*argv: str) -> str:
        command = [sys.executable, "-m", "dfm_nb", *argv]
        return subprocess.run(command, cwd=root, text=True, capture_output=True).stdout

    def flags(*command: str) -> int:
        text = printed(*command, "--help")
        if " ...   (" in text:  # it lists subcommands
            return sum(flags(*command, verb) for verb in re.findall(r"^  (\w+) ", text, re.M))
        return len(set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.M)) - {"--help"})

    settings = len(printed("pretrain", "--print-config").splitlines()) - 1
    words = sum(len(p.read_text(encoding="utf-8").split()) for p in (root / "docs").rglob("*.md"))
    return f"{settings} settings, {flags()} flags, {words:,} words in docs"


def without(root: Path, name: str) -> list[str]:
    """Files with an integration's name as a word of their path, and lines of other files that name one of its parts."""
    files = subprocess.run(["git", "ls-files"], cwd=root, text=True, capture_output=True).stdout.splitlines()
    word = re.compile(rf"(^|[-_/.]){name.replace('_', '[-_]')}([-_/.]|$)")
    gone = [file for file in files if word.search(file)]
    sources = [(root / file).read_text(encoding="utf-8") for file in gone if re.search(r"network\.py$|\.txt$", file)]
    parts = [f"model.variant={n}" for n in re.findall(r"^(\w+) = .*network:", "\n".join(sources), re.M)]
    parts += re.findall(r"^(\w+) = (?!.*network:)", "\n".join(sources), re.M)  # tokenizers, text encoders
    parts += re.findall(r'"([\w.-]+)": size_row', "\n".join(sources))
    parts += [Path(file).stem if "/recipes/" in file or file.endswith(".ipynb") else file for file in gone]
    parts += [Path(file).name for file in gone if file.endswith(".md")] + [f"[{name}]", f"{name} = ["]
    lines = [
        f"{file}:{i}: {line.strip()[:100]}"
        for file in files
        if file not in gone
        and Path(file).suffix in (".py", ".md", ".toml", ".ipynb", ".yaml")
        and file != "CHANGELOG.md"
        for i, line in enumerate((root / file).read_text(encoding="utf-8").splitlines(), 1)
        if any(re.search(rf"(?<!\w){re.escape(part)}(?!\w)", line) for part in parts)
    ]
    return [*gone, *lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout to count")
    parser.add_argument("--record", action="store_true", help="count settings, flags and words of the docs too")
    parser.add_argument("--without", metavar="INTEGRATION", help="list what to remove with it")
    args = parser.parse_args()
    if args.without:
        print(*without(args.root, args.without), sep="\n")
        return 0
    budget = tomllib.loads((args.root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["dfm_nb"]["budget"]
    found = rooms(args.root)
    for room, lines in sorted(found.items()):
        print(f"{room:22}{lines:7,} of {budget.get(room, 0):6,}" + ("  OVER" if lines > budget.get(room, 0) else ""))
    if args.record:
        print(record(args.root))
    over = [room for room, lines in found.items() if lines > budget.get(room, 0)]
    if over:
        print(
            f"over the budget in pyproject.toml: {', '.join(over)}; remove code, or see CONTRIBUTING", file=sys.stderr
        )
    return bool(over)


if __name__ == "__main__":
    raise SystemExit(main())
