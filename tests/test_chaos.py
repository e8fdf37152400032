"""Kills of a preparation, each kind once: the folder ends as that of the uninterrupted command.

`make chaos` kills training and text preprocessing too; their kills: tests/test_train.py, tests/text/test_corpus.py.
"""

import random

import pytest

from benchmarks import chaos


@pytest.mark.slow
def test_killed_preparation_ends_as_the_uninterrupted_one(tmp_path):
    chaos.server()
    area, clean = chaos.preparation(24, 4), tmp_path / "clean"
    times = chaos.uninterrupted(area, clean, tmp_path / "said.txt")
    wanted = area.result(clean)
    found = chaos.kills(area, tmp_path, 3, wanted, times, random.Random(2))
    assert wanted and not found["faults"], found
    assert sorted(kill["victim"] for kill in found["each_kill"]) == sorted(chaos.VICTIMS)
