"""`make docs`: pdoc renders every public module from its docstrings, and finds nothing to warn about."""

from __future__ import annotations

import re

import pytest

from scripts import api_reference
from tests.docs.docs_pages import ROOT
from tests.processes import commands


@pytest.mark.slow
def test_every_public_module_has_a_page_with_its_header(tmp_path):
    done = commands().run("python", ROOT / "scripts" / "api_reference.py", tmp_path)
    assert done.returncode == 0 and "Warn" not in done.stderr, done.stdout + done.stderr
    for module in filter(api_reference.is_public, api_reference.all_modules()):
        page = (tmp_path / (module.replace(".", "/") + ".html")).read_text(encoding="utf-8")
        assert re.search(r'class="docstring"><p>.{20}', page, re.S), module
