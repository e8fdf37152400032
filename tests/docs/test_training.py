"""docs/training.md: every bash block runs, in order, on a tiny data set."""

from __future__ import annotations

import pytest

from dfm_nb.base.metrics import read_metrics
from dfm_nb.checkpoints import weights as checkpoint
from tests.docs.docs_pages import Page, desk

PAGE = Page("docs/training.md")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_block_of_the_page_runs(tiny_data, tmp_path):
    (tmp_path / "butterflies").symlink_to(tiny_data)
    desk(tmp_path).run_page(PAGE)

    first, elsewhere = (read_metrics(tmp_path / "runs" / name / "metrics.jsonl") for name in ("first", "elsewhere"))
    want = {r["iteration"]: r for r in first if "loss" in r}
    got = {r["iteration"]: r for r in elsewhere if "loss" in r}
    assert sorted(want) == list(range(1, 11)) and sorted(got) == [5, 6, 7, 8]
    assert [got[i]["loss"] for i in got] == pytest.approx([want[i]["loss"] for i in got], rel=1e-4)
    exported = checkpoint.find_weights(tmp_path / "exported" / "model.safetensors")
    assert exported.config.model.hidden_size == 48
    assert len(read_metrics(tmp_path / "runs" / "tuned" / "metrics.jsonl")) == 2
