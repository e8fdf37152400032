"""The budget: tokens per room, compared with `[tool.dfm_nb.budget]` in pyproject.toml.

    python scripts/house_figures.py

Tokens are names, operators, numbers and strings of the code, without docstrings: unlike lines they do not fall when
code is folded. Code lines are printed beside them and not held. The core is what `prepare`, `train` and `generate`
import, with the sources `folder` and `table`, the tokenizer `cosmos_cv` and the text encoder `t5`. The exit code is 1
if a room is above its budget or has none, or if dfm_nb has more folded statements than `[tool.dfm_nb.folding]`
allows.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = ("dfm_nb", "workbench", "tests", "benchmarks", "scripts", "examples")
CORE_ROOTS = (
    "dfm_nb.prepare",
    "dfm_nb.train",
    "dfm_nb.generate",
    "dfm_nb.data.sources.folder",
    "dfm_nb.data.sources.table",
    "dfm_nb.data.tokenizers.cosmos_cv",
    "dfm_nb.data.text_encoders.t5",
)
"""What the core is found from: three verbs, and the plug-ins that they load by name for pictures of a user's own."""
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef):  # including strings below constants and fields
            statements = node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            statements = node.body[:1]
        else:
            continue
        for statement in statements:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if is_text and isinstance(statement.value.value, str):
                lines.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    return lines


def folded(source: str) -> Counter[str]:
    """Statements that say several things at once, by the names of `[tool.dfm_nb.folding]`."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, COMPREHENSIONS):
            inner = [each for each in ast.walk(node) if isinstance(each, COMPREHENSIONS)]
            found["comprehensions"] += 1
            found["nested"] += len(inner) > 1 or len(node.generators) > 1
        found["walrus"] += isinstance(node, ast.NamedExpr)
        if isinstance(node, ast.Assign):
            found["pairs"] += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    return found


def measured(source: str) -> Counter[str]:
    """Tokens, code lines and folded statements of a file."""
    docstrings = docstring_lines(source)
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in docstrings:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return Counter(tokens=tokens, lines=len(lines - docstrings)) + folded(source)


def imported(source: str, module: str, is_package: bool) -> set[str]:
    """Names that a module imports anywhere, also inside functions, but not for type checkers alone."""
    names: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(source)]
    package = module if is_package else module.rpartition(".")[0]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            nodes += node.orelse
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
        nodes += ast.iter_child_nodes(node)
    return names


def core(files: dict[str, Path], roots: Iterable[str] = CORE_ROOTS) -> set[str]:
    """The modules that `roots` import, directly or through others. files : of the package, by module."""
    reached: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        path = files[module]
        names = imported(path.read_text(encoding="utf-8"), module, path.name == "__init__.py")
        waiting += [name for name in names if name in files and name != "dfm_nb"]
    return reached


def package(root: Path) -> dict[str, Path]:
    """The files of `dfm_nb` by module."""
    files = {path.relative_to(root): path for path in (root / "dfm_nb").rglob("*.py")}
    return {".".join(name.with_suffix("").parts).removesuffix(".__init__"): path for name, path in files.items()}


def rooms(root: Path) -> dict[str, Counter[str]]:
    """{room: tokens and code lines}: trees, folders of the package, its verbs (`dfm_nb/*.py`), and the core."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    by_path: dict[Path, Counter[str]] = {}
    for tree in TREES:
        for path in (root / tree).rglob("*.py"):
            figures = measured(path.read_text(encoding="utf-8"))
            found[tree] += figures
            if tree == "dfm_nb":
                parts = path.relative_to(root).parts
                found[f"dfm_nb/{parts[1]}" if len(parts) > 2 else "dfm_nb/*.py"] += figures
                by_path[path] = figures
    modules = package(root)
    for module in core(modules):
        found["core"] += by_path[modules[module]]
    return found


def main() -> int:
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["dfm_nb"]
    budget = limits["budget"]
    found = rooms(ROOT)
    print(f"{'':22}{'tokens':>8}    budget    lines  tokens a line")
    over = []
    for room, figures in sorted(found.items()):
        tokens, lines = figures["tokens"], figures["lines"]
        print(f"{room:22}{tokens:8,} of {budget.get(room, 0):7,}{lines:9,}{tokens / max(lines, 1):8.1f}")
        if tokens > budget.get(room, 0):
            over.append(room)
    own = found["dfm_nb"]
    for kind, most in limits["folding"].items():
        share = 1000 * own[kind] / own["lines"]
        print(f"dfm_nb: {kind} {share:.1f} of {most} per 1,000 lines")
        if share > most:
            over.append(kind)
    if over:
        print(
            f"over the budget in pyproject.toml: {', '.join(over)}; remove code, or see CONTRIBUTING", file=sys.stderr
        )
    return bool(over)


if __name__ == "__main__":
    raise SystemExit(main())
