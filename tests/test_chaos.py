"""`make chaos` in short: kills of each kind, a full disk, damage to every file of a checkpoint and a data folder.

Its full form is in benchmarks/results/chaos.md.
"""

import random
import shutil

import pytest

from benchmarks import chaos

AREAS = {
    "prepare": lambda place: chaos.preparation(24, 4),
    "train": lambda place: chaos.training(16, ["--mock"]),
    "text": lambda place: chaos.text(place, 1500),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AREAS)
def test_killed_command_ends_as_the_uninterrupted_one(tmp_path, name):
    chaos.server()
    area, clean = AREAS[name](tmp_path), tmp_path / "clean"
    times = chaos.uninterrupted(area, clean, tmp_path / "said.txt")
    wanted = area.result(clean)
    found = chaos.kills(area, tmp_path, 3, wanted, times, random.Random(2))
    assert wanted and not found["faults"], found
    assert sorted(kill["victim"] for kill in found["each_kill"]) == sorted(chaos.VICTIMS)
    if name == "text":  # the other two: tests/attacks/test_preparation.py, tests/test_train_faults.py
        disks = chaos.full_disks(area, tmp_path, clean, wanted, (0.5,))
        assert disks["too_small"] == 1 and not disks["faults"], disks


@pytest.mark.slow
def test_damage_to_any_file_is_refused_or_named(one_rank, tiny_data, tiny_checkpoint, tmp_path):
    data, run = shutil.copytree(tiny_data, tmp_path / "data"), shutil.copytree(tiny_checkpoint, tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "iter_0000003", run / "checkpoints" / "iter_0000006")
    found = chaos.damage(data, run, 2, random.Random(0))
    assert not found["faults"], found
    cases = found["cases"]
    assert cases["training on the folder"]["samples left out"] and cases["dfm inspect --verify"]["refused"]
    assert cases["generating from the checkpoint"].keys() == {"refused"}
    assert cases["generating from the run"].keys() == cases["resuming the run"].keys() == {"the one before"}
