"""docs/parallelism.md and workbench.md: every bash and python block runs, in order, on two CPU processes."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from dfm_nb import config as cfg
from dfm_nb.model import attention
from tests.docs.docs_pages import ROOT, Page, desk
from workbench import notebook_run

PARALLELISM, CLUSTER, WORKBENCH = (Page(f"docs/{name}.md") for name in ("parallelism", "cluster", "workbench"))
PAGES = [PARALLELISM, CLUSTER, WORKBENCH]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_block_of_the_pages_runs(tmp_path):
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    here = desk(tmp_path)
    layouts = here.run_page(PARALLELISM)
    here.said = ""
    notebooks = here.run_page(WORKBENCH)

    assert "2 {'tp': 1, 'cp': 1, 'dp': 1, 'pp': 1}" in layouts and "pp [[0, 8], [1, 9]" in layouts
    assert "TP * PP * CP must divide the number of processes = 6" in layouts
    assert "DiT-XL, 686 M parameters" in layouts and "The first one's settings:" in layouts
    mock = [json.loads(line) for line in (tmp_path / "runs" / "tp2" / "metrics.jsonl").read_text().splitlines()]
    assert mock[-1]["iteration"] == 3
    same = re.findall(r"^(\d) (\d\.\d+) (\d\.\d+)$", layouts, re.M)
    assert [row[0] for row in same] == ["1", "2", "3"]

    assert (
        re.search(r"short_side +int +64 ", notebooks)
        and (tmp_path / "runs" / "parallelism.html").stat().st_size > 10_000
    )
    assert "'many'" in notebooks and "guidence" in notebooks and "[[0, 1], [2, 3], [4, 5], [6, 7]]" in notebooks


def test_the_pages_name_every_layout_setting_and_every_back_end():
    keys = [k for k in cfg.fields() if k.endswith("parallel_size") or k.endswith("sequence_parallel")]
    assert len(keys) == 5 and [k for k in keys if k not in PARALLELISM.text] == []
    assert [b for b in attention.BACKENDS if f"`{b}`" not in PARALLELISM.text] == []


def test_every_setting_that_the_pages_name_exists():
    for page in PAGES:
        named = set(re.findall(r"\b((?:model|train|optimizer|dataset|dist|logger|checkpoint)\.[a-z_]+)\b", page.text))
        known = set(cfg.fields()) | {"model.lora", "train.sbatch"}
        assert sorted(named - known) == [], page.path.name


def test_the_workbench_page_names_every_notebook_and_only_parameters_that_exist():
    for notebook in sorted((ROOT / "notebooks").glob("0*.ipynb")):
        assert f"`{notebook.stem}`" in WORKBENCH.text
    shown = next(code for language, code in WORKBENCH.fences if language == "text" and "sweep" in code)
    words = shlex.split(shown)
    grid = words[words.index("--grid") + 1 : words.index("--jobs")]
    assert grid and {g.partition("=")[0] for g in grid} <= set(notebook_run.parameters(ROOT / words[3]))
