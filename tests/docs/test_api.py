"""`make docs`: pdoc renders every public module from its docstrings, and finds nothing to warn about."""

from __future__ import annotations

import re

import pytest

from scripts import api_reference
from tests.docs.docs_pages import ROOT
from tests.processes import commands


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    place = tmp_path_factory.mktemp("api")
    done = commands().run("python", ROOT / "scripts" / "api_reference.py", place)
    assert done.returncode == 0 and "Warn" not in done.stderr, done.stdout + done.stderr
    return place


def page(place, module):
    return (place / (module.replace(".", "/") + ".html")).read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_public_module_has_a_page_with_its_header(pages):
    public = [m for m in api_reference.all_modules() if api_reference.is_public(m)]
    assert len(public) > 80 and {"dfm_nb.diffusion.samplers", "dfm_nb.data.tokenizers.pca", "workbench.form"} <= set(
        public
    )
    assert [m for m in public if not (pages / (m.replace(".", "/") + ".html")).is_file()] == []
    empty = [m for m in public if not re.search(r'class="docstring"><p>.{20}', page(pages, m), re.S)]
    assert empty == []
    hidden = [m for m in api_reference.all_modules() if not api_reference.is_public(m)]
    assert hidden and [m for m in hidden if (pages / (m.replace(".", "/") + ".html")).is_file()] == []


@pytest.mark.slow
def test_pages_hold_signatures_parameters_and_the_lazy_names_of_the_workbench(pages):
    samplers = page(pages, "dfm_nb.diffusion.samplers")
    assert "sample_heun" in samplers and "karras_sigmas" in samplers and "num_steps" in samplers
    prepare = page(pages, "dfm_nb.data.sources.table")
    assert "Parameters" in prepare and "caption_column" in prepare
    workbench = page(pages, "workbench")
    assert all(name in workbench for name in ("Launcher", "ConfigForm", "RankGrid"))
    assert (pages / "search.js").stat().st_size > 10_000


def test_nothing_that_is_public_begins_with_an_underscore():
    assert not api_reference.is_public("dfm_nb.data.sources._rows") and not api_reference.is_public("dfm_nb.__main__")
    assert api_reference.is_public("dfm_nb.data.text_encoders.t5")
