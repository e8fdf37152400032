"""docs/from-nemo-dfm.md: the tests that its table names exist."""

import ast
import re

from tests.docs.docs_pages import ROOT, Page

PAGE = Page("docs/from-nemo-dfm.md")


def test_every_named_test_exists():
    found = 0
    for row in re.findall(r"^\|.*\|$", PAGE.text, re.M):
        file = None
        for name in re.findall(r"`((?:tests/[\w/]+(?:\.py)?)?(?:::\w+)?)/?`", row):
            path, _, test = name.partition("::")
            if path:
                file = ROOT / path
            assert file is not None and file.exists(), row
            if test:
                tree = ast.parse(file.read_text())
                assert test in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, f"{name} in {row}"
            found += 1
    assert found > 60
