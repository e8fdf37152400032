"""What the exercises of the notebooks name in code exists: parameters, functions, settings, flags."""

import ast
import builtins
import re
from pathlib import Path

import nbformat
import pytest

from dfm_nb import config
from dfm_nb.config.sizes import SIZES
from dfm_nb.diffusion import samplers
from dfm_nb.generation.request import Request

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECTION = re.compile(r"^## Try it$(.*?)(?=^## |\Z)", re.M | re.S)
CODE = re.compile(r"```\n(.*?)```|`([^`\n]+)`", re.S)
COMMANDS = ("dfm ", "make ", "truncate ")
OPTION = re.compile(r"^    (\w+): .* = (?:option|recommended)\(", re.M)


def names_in(tree: ast.AST) -> set[str]:
    """Every identifier of some code: variables, functions, attributes, keywords, imports."""
    found = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.add(value)
    return found


def known_to(notebook: nbformat.NotebookNode) -> set[str]:
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    own = names_in(ast.parse(code.replace("await ", "")))
    return own | set(dir(builtins)) | set(samplers.names()) | set(Request.model_fields)


def flags() -> set[str]:
    sources = (path.read_text() for path in (ROOT / "dfm_nb").rglob("*.py"))
    return {name for source in sources for name in OPTION.findall(source)}


def unknown(span: str, known: set[str]) -> set[str]:
    """The names of a span that do not exist; the span itself if it is neither code nor a command, flag or file."""
    others = {*SIZES, *(path.stem for path in NOTEBOOKS)}
    if span.startswith(COMMANDS) or span in others or re.fullmatch(r"[\w/]*[./][\w./]+", span):
        return set()
    if span.startswith("--"):
        return {span.split()[0][2:].replace("-", "_")} - flags()
    if re.match(r"\w+\.\w+=", span):
        config.resolve("demo", overrides=[span])  # an unknown key is an error
        return set()
    if span.startswith("for "):
        span += ": pass"
    try:
        tree = ast.parse(span)
    except SyntaxError:
        return {span}
    variables = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = {alias.asname or alias.name for node in ast.walk(tree) for alias in getattr(node, "names", [])}
    if "\n" in span.strip():  # an answer with variables of its own
        own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return variables - own - known


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_names_in_exercises_exist(path):
    notebook = nbformat.read(path, 4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    sections = SECTION.findall(text)
    assert sections, "a notebook ends with something to try"
    known = known_to(notebook)
    spans = [block or span for section in sections for block, span in CODE.findall(section)]
    assert spans
    assert not {span: unknown(span, known) for span in spans if unknown(span, known)}
