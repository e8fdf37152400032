"""docs/training.md: every bash block runs, in order, on a tiny data set."""

import pytest

from dfm_nb.base.metrics import read_metrics
from tests.docs.docs_pages import Page, desk

PAGE = Page("docs/training.md")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_block_of_the_page_runs(tiny_data, tmp_path):
    (tmp_path / "butterflies").symlink_to(tiny_data)
    desk(tmp_path).run_page(PAGE)

    first, elsewhere, tuned = (
        [r["iteration"] for r in read_metrics(tmp_path / "runs" / name / "metrics.jsonl") if "loss" in r]
        for name in ("first", "elsewhere", "tuned")
    )
    assert first == list(range(1, 11)) and elsewhere == [5, 6, 7, 8] and len(tuned) == 2
    assert (tmp_path / "exported" / "model.safetensors").is_file()
