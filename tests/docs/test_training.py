"""docs/training.md: every bash block runs, in order, on a tiny data set; the settings and links that it names exist."""

from __future__ import annotations

import re

import pytest

from dfm_nb import config as cfg
from dfm_nb.base.metrics import read_metrics
from dfm_nb.checkpoints import weights as checkpoint
from tests.docs.docs_pages import Page, desk

PAGE = Page("docs/training.md")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_block_of_the_page_runs(tiny_data, tmp_path):
    (tmp_path / "butterflies").symlink_to(tiny_data)
    said = desk(tmp_path).run_page(PAGE)

    faults = (tmp_path / "faults.txt").read_text()
    assert "2 faults" in faults and "model.hidden_size" in faults and "optimizer.lr" in faults
    assert re.search(r"^optimizer.lr +0\.0005 +command line", said, re.M) and re.search(
        r"^model.hidden_size +48 +my_config", said, re.M
    )
    first, elsewhere = (read_metrics(tmp_path / "runs" / name / "metrics.jsonl") for name in ("first", "elsewhere"))
    want = {r["iteration"]: r for r in first if "loss" in r}
    got = {r["iteration"]: r for r in elsewhere if "loss" in r}
    assert sorted(want) == list(range(1, 11)) and sorted(got) == [5, 6, 7, 8]
    assert [got[i]["loss"] for i in got] == pytest.approx([want[i]["loss"] for i in got], rel=1e-4)
    assert [got[i]["samples"] for i in got] == [want[i]["samples"] for i in got]
    rounds = [r for r in first if "val_loss" in r]
    assert len(rounds) == 2 and len(rounds[0]["val_loss_ema_0.05_by_sigma"]) == 4
    kept = [
        checkpoint.iteration_of(p) for p in checkpoint.whole_checkpoints(tmp_path / "runs" / "first" / "checkpoints")
    ]
    assert kept == [4, 8, 10]
    exported = checkpoint.find_weights(tmp_path / "exported" / "model.safetensors")
    assert exported.config.model.hidden_size == 48 and "of length 0.08 from" in said
    assert len(read_metrics(tmp_path / "runs" / "tuned" / "metrics.jsonl")) == 2


def test_settings_that_the_page_names_exist():
    names = set(cfg.fields()).union(*(f.limits.get("aliases", ()) for f in cfg.fields().values()))
    named = set(
        re.findall(
            r"\b((?:model|train|optimizer|scheduler|dataset|checkpoint|ema|validation|logger|dist)\.[a-z_.]+)",
            PAGE.text,
        )
    )
    named = {n.rstrip(".") for n in named if not n.endswith((".pth", ".safetensors", ".png"))}
    wrong = {n for n in named - names if not any(k.startswith(f"{n}.") for k in names)}
    assert len(named) > 30 and wrong <= {"model.hiden_size"}
