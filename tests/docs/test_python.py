"""docs/python.md: every block runs, in order, in an empty folder; its table names what the package has."""

from __future__ import annotations

import re

import pytest

import dfm_nb
from tests.docs.docs_pages import Page, desk

PAGE = Page("docs/python.md")


def test_the_page_names_every_function():
    named = set(re.findall(r"^\| `(\w+)", PAGE.text, re.M))
    assert named == set(dfm_nb.__all__)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_block_of_the_page_runs(tmp_path):
    said = desk(tmp_path).run_page(PAGE)
    assert "PreparedDataset('data/colours': 4 samples" in said and "every sample is good" in said
    assert "3 iterations, last loss" in said and re.search("^[01] morpho.mp4", said, re.M) and "upper_bound" in said
    assert (tmp_path / "clips" / "1.mp4.json").is_file() and (tmp_path / "exported" / "model.safetensors").is_file()
