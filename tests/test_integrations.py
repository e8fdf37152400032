"""The core knows no network by its name, and an integration is its folder."""

import ast
from collections.abc import Iterator
from pathlib import Path

from dfm_nb.config import networks

ROOT = Path(networks.__file__).parents[2]
FILES = [
    p for package in ("dfm_nb", "workbench") for p in (ROOT / package).rglob("*.py") if "integrations" not in p.parts
]
NAMES = {*networks.names(), "wan", "dfm"}
FORMAT = ROOT / "dfm_nb" / "export.py"
"""Its `--format dfm` is no network."""


def asked(tree: ast.AST) -> Iterator[ast.AST]:
    """What is compared, a key or looked up."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.Subscript):
            yield node.slice
        elif isinstance(node, ast.Dict):
            yield from filter(None, node.keys)
        elif isinstance(node, ast.MatchValue):
            yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "find", "load", "startswith"):
            yield from (arg for arg in node.args if isinstance(arg, ast.Constant))


def test_no_code_of_the_core_asks_for_the_name_of_a_network():
    found = [
        (path.relative_to(ROOT), leaf.lineno)
        for path in FILES
        for part in asked(ast.parse(path.read_text(encoding="utf-8")))
        for leaf in ast.walk(part)
        if (isinstance(leaf, ast.Constant) and leaf.value in NAMES and path != FORMAT)
        or (isinstance(leaf, ast.Attribute) and leaf.attr == "variant")
    ]
    assert not found
