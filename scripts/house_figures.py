"""Figures of a checkout: lines and files per room, import arrows, longest function, comment share, words of the docs.

python scripts/house_figures.py [--root CHECKOUT] [--before CHECKOUT] [--json]

It only reads files, so it counts any commit, for example one that `git worktree add ../before COMMIT` checked out.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import io
import json
import statistics
import tokenize
from pathlib import Path

PACKAGE = "dfm_nb"


def modules(root: Path) -> dict[str, Path]:
    """{dotted name: file} of the package."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(path: Path, root: Path) -> str:
    """The folder below the package; files directly in it are the room `.`."""
    parts = path.relative_to(root / PACKAGE).parts
    return parts[0] if len(parts) > 1 else "."


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The package's own modules that a file imports, also inside functions and under TYPE_CHECKING."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # `from . import x`, `from ..base import y`
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from dfm_nb.base import log` names a module, `from dfm_nb.base.log import start` a thing in one.
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names}
    return {m for m in found if m in known and m != name}


def unlisted(root: Path, names: list[str]) -> list[str]:
    """Modules that no layer of an import-linter `layers` contract holds; `exhaustive_ignores` are not counted."""
    parser = configparser.ConfigParser()
    parser.read(root / ".importlinter", encoding="utf-8")
    layers: set[str] = set()
    for section in parser.sections():
        contract = parser[section]
        if contract.get("type") != "layers":
            continue
        entries = [*contract["layers"].replace("|", "\n").split(), *contract.get("exhaustive_ignores", "").split()]
        container = contract.get("containers", "").strip()
        layers |= {f"{container}.{e}" if container else e for e in entries}
    held = lambda name: any(name == layer or name.startswith(layer + ".") for layer in layers)  # noqa: E731
    return [n for n in names if n not in (PACKAGE, f"{PACKAGE}.__main__") and not held(n)]


def functions(path: Path) -> list[tuple[int, str]]:
    """(lines, name) of every function and method."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(n.end_lineno - n.lineno + 1, n.name) for n in ast.walk(tree) if isinstance(n, kinds) and n.end_lineno]


def comment_lines(path: Path) -> tuple[int, int]:
    """(lines that are a comment, lines with code); docstrings, blank lines and tool pragmas are neither."""
    text = path.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    comments: set[int] = set()
    code: set[int] = set()
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if not token.string.removeprefix("#").strip().startswith(("noqa", "type:", "fmt:", "!")):
                comments.add(token.start[0])
        elif token.type not in layout:
            code.update(set(range(token.start[0], token.end[0] + 1)) - docstrings)
    return len(comments - code), len(code)


def words(paths: list[Path]) -> int:
    return sum(len(p.read_text(encoding="utf-8").split()) for p in paths if p.is_file())


def figures(root: Path) -> dict:
    """All figures of a checkout, ready for JSON."""
    known = modules(root)
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in known.items()}
    rooms: dict[str, list[int]] = {}
    for name, path in known.items():
        rooms.setdefault(room_of(path, root), []).append(lines[name])
    arrows = {(a, b) for a, path in known.items() for b in imports(a, path, known)}
    between = {(room_of(known[a], root), room_of(known[b], root)) for a, b in arrows}
    between = {(a, b) for a, b in between if a != b and b != "."}
    defined = [(n, f"{name}.{f}") for name, path in known.items() for n, f in functions(path)]
    comments, code = map(sum, zip(*(comment_lines(p) for p in known.values())))
    pages = sorted((root / "docs").rglob("*.md"))
    log = [p for p in pages if "log" in p.relative_to(root / "docs").parts[:-1]]
    longest, where = max(defined)
    count = lambda folder: sum(  # noqa: E731
        len(p.read_text(encoding="utf-8").splitlines()) for p in (root / folder).rglob("*.py")
    )
    return {
        "rooms": {room: {"files": len(n), "lines": sum(n)} for room, n in sorted(rooms.items())},
        "package files": len(known),
        "package lines": sum(lines.values()),
        "workbench lines": count("workbench"),
        "tests lines": count("tests"),
        "most files in one folder": max(len(list(p.glob("*.py"))) for p in {f.parent for f in known.values()}),
        "longest file": max(lines.values()),
        "import arrows between modules": len(arrows),
        "import arrows between rooms": len(between),
        "modules in no layer of the import contract": len(unlisted(root, list(known))),
        "functions": len(defined),
        "median lines of a function": statistics.median(n for n, _ in defined),
        "longest function": f"{longest} ({where})",
        "functions over 60 lines": sum(n > 60 for n, _ in defined),
        "comment lines in 100 lines of code": round(100 * comments / code, 1),
        "README words": words([root / "README.md"]),
        "docs words without docs/log": words([p for p in pages if p not in log]),
        "docs/log words": words(log),
    }


def shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description="Count a checkout.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout to count")
    parser.add_argument("--before", type=Path, help="another checkout, for a second column")
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown tables")
    args = parser.parse_args()
    found = [figures(root.resolve()) for root in (args.before, args.root) if root]
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for each in found:
        print("| room | files | lines |\n|---|---|---|")
        for room, n in each.pop("rooms").items():
            print(f"| `{room}` | {n['files']} | {n['lines']:,} |")
        print()
    print("| figure |" + (" before | after |" if args.before else " |") + "\n|" + "---|" * (1 + len(found)))
    for name in found[0]:
        print(f"| {name} | " + " | ".join(shown(each[name]) for each in found) + " |")


if __name__ == "__main__":
    main()
