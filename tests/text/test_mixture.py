"""Blends: parsing, checks, strategies against their closed forms, epochs."""

from pathlib import Path

import numpy as np
import pytest

from dfm_nb.text import commands
from dfm_nb.text import mixture as tm
from tests.refusals import refused
from tests.text.corpora import words_of, write_pair

TOKENS = {"news": 600, "docs": 300, "forum": 100}
PAGE = """
- dataset_prefix: {d}/news_text_document
  dataset_weight: 0.5
  dataset_split: train
- dataset_prefix: {d}/docs_text_document
  dataset_weight: 0.3
  dataset_split: train
- dataset_prefix: {d}/forum_text_document
  dataset_weight: 0.2
  dataset_split: train
- dataset_prefix: {d}/news_text_document
  dataset_weight: 1.0
  dataset_split: validation
"""


@pytest.fixture
def folder(tmp_path):
    for name, count in TOKENS.items():
        write_pair(tmp_path / f"{name}_text_document", [[np.arange(10)]] * (count // 10), np.uint16)
    return tmp_path


def prefixes(folder):
    return [f"{folder}/{name}_text_document" for name in TOKENS]


def blend_of(folder, weights=None):
    names = prefixes(folder)
    return tm.parse_list(names if weights is None else words_of(weights, names))


def weights(blend):
    return [s.dataset_weight for s in blend.train]


def test_list_and_yaml_give_the_same_blend(folder):
    (folder / "b.yaml").write_text(PAGE.format(d=folder))
    from_yaml, from_list = tm.read_yaml(folder / "b.yaml"), blend_of(folder, [0.5, 0.3, 0.2])
    assert from_yaml.train == from_list.train
    tm.write_yaml(from_yaml, folder / "again.yaml")
    assert tm.read_yaml(folder / "again.yaml") == from_yaml
    assert [s.name for s in from_yaml.train] == list(TOKENS)
    assert [s.name for s in from_yaml.corpora("validation")] == ["news"]
    assert "news" in from_yaml.warnings[0] and "evaluated" in from_yaml.warnings[0]


def test_weights_must_sum_to_one_per_split(folder):
    refused("train.*1.1", blend_of, folder, [0.5, 0.3, 0.3])
    refused("0 or more", blend_of, folder, [-1, 1, 1])
    first = prefixes(folder)[0]
    refused("once", tm.parse_list, ["0.5", first, "0.5", f"{Path(first).parent}/./{Path(first).name}"])
    assert weights(tm.parse_list(words_of([2, 1, 1], prefixes(folder)), normalize=True)) == [0.5, 0.25, 0.25]
    text = PAGE.format(d=folder).replace("dataset_weight: 1.0", "dataset_weight: 0.9")
    (folder / "b.yaml").write_text(text)
    refused("validation", tm.read_yaml, folder / "b.yaml")
    assert tm.read_yaml(folder / "b.yaml", normalize=True)[-1].dataset_weight == 1


def test_strategies_are_their_formulas(folder):
    blend = blend_of(folder)
    counts = tm.token_counts(blend)
    assert list(counts.values()) == [600, 300, 100]

    def run(strategy):
        return weights(tm.apply_strategy(blend, strategy, counts))

    assert run("proportional") == pytest.approx([0.6, 0.3, 0.1])
    assert run("equal") == pytest.approx([1 / 3] * 3)
    assert run("upweight:forum=0.6") == pytest.approx([0.4 * 600 / 900, 0.4 * 300 / 900, 0.6])
    total = 1 / 600 + 1 / 300 + 1 / 100
    assert run("token-balanced") == pytest.approx([1 / 600 / total, 1 / 300 / total, 1 / 100 / total])
    rows = tm.exposures(tm.apply_strategy(blend, "proportional", counts), counts, 3000)
    assert [r["epochs"] for r in rows] == pytest.approx([3, 3, 3])  # the budget times the weight over the tokens


def test_yaml_is_read_as_written(tmp_path):
    rows = "- {dataset_prefix: 007, dataset_weight: 1e-1}\n- {dataset_prefix: 1.10, dataset_weight: 0.9}\n"
    (tmp_path / "b.yaml").write_text(rows)
    rows_read = [(row.dataset_prefix, row.dataset_weight) for row in tm.read_yaml(tmp_path / "b.yaml")]
    assert rows_read == [("007", 0.1), ("1.10", 0.9)]
    for wrong in (rows.replace("1e-1", "1:30"), rows.replace("}\n- {", ", ")):  # a key twice: a dash is forgotten
        (tmp_path / "b.yaml").write_text(wrong)
        refused("b.yaml.*dataset_", tm.read_yaml, tmp_path / "b.yaml")


@pytest.mark.parametrize(
    "old, new", [("0.5", "heavy"), ("validation", "dev"), ("docs_text", "news_text"), ("- d", "{")]
)
def test_yaml_faults_are_named(folder, old, new):
    (folder / "b.yaml").write_text(PAGE.format(d=folder).replace(old, new))
    refused(new, tm.read_yaml, folder / "b.yaml")


@pytest.mark.parametrize("strategy", ["best", "upweight:news=1.5", "upweight:nws=0.5"])
def test_strategy_faults_are_named(folder, strategy):
    blend = blend_of(folder)
    refused(strategy.rpartition(":")[2], tm.apply_strategy, blend, strategy, tm.token_counts(blend))


@pytest.mark.parametrize("words", [["0.5", "A", "B"], [], ["nan", "A"]])
def test_list_faults_are_refused(words):
    refused("", tm.parse_list, words)


def test_missing_corpus_is_named(folder):
    refused("gone", commands.main, ["blend", "1.0", str(folder / "gone")], error=FileNotFoundError)
