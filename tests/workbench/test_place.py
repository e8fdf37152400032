"""Which model a notebook works with."""

import os

import pytest

from workbench import trained_or_packaged


@pytest.mark.slow
def test_first_run_with_a_model_is_taken_else_the_packaged(tiny_checkpoint, tmp_path, capsys):
    missing, empty = tmp_path / "none", tmp_path / "empty"
    (empty / "checkpoints").mkdir(parents=True)
    assert trained_or_packaged(missing, tiny_checkpoint, empty) == os.fspath(tiny_checkpoint)
    assert str(tiny_checkpoint) in capsys.readouterr().out
    assert trained_or_packaged(missing, empty) == "butterflies"
    said = capsys.readouterr().out
    assert str(missing) in said and str(empty) in said and "butterflies" in said
