"""TorchScript that lies in a folder of data or a checkpoint is not run; the one that the user names is."""

from pathlib import Path

import pytest
import torch

from dfm_nb import inspect
from dfm_nb.base.argv import guard
from dfm_nb.data.adoption import index_dataset
from dfm_nb.generation.pipeline import Pipeline
from tests.attacks.checkpoint_files import copy_run, reseal
from tests.attacks.sample_files import seal_as_it_is
from tests.json_files import read_json, write_json
from tests.refusals import refused


class WritesAFile(torch.nn.Module):
    """A decoder; TorchScript can make and write any file of the user."""

    def __init__(self, mark: str):
        super().__init__()
        self.mark = mark

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        written = torch.from_file(self.mark, True, 4)
        written.fill_(1.0)
        frames = torch.zeros(z.shape[0], 3, 4 * (z.shape[2] - 1) + 1, 8 * z.shape[3], 8 * z.shape[4])
        return frames + written[0] * 0


def poison(folder: Path, mark: Path) -> None:
    """The folder names cosmos_cv and brings it."""
    manifest = read_json(folder / "manifest.json")
    manifest["tokenizer"] = {"name": "cosmos_cv"}
    write_json(folder / "manifest.json", manifest)
    save_program(folder, mark)


def save_program(folder: Path, mark: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("decoder.jit", "encoder.jit"):
        torch.jit.script(WritesAFile(str(mark))).save(str(folder / name))


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "ran"


@pytest.fixture
def data(data, mark):
    poison(data, mark)
    index_dataset(data)  # its maker writes checksums that fit
    return data


@pytest.mark.parametrize("missing", [None, "manifest.json", "tokenizer.safetensors"])
def test_inspect_runs_no_program_of_the_data(data, mark, wrong_use, monkeypatch, missing):
    """Whether the manifest or the user names the tokenizer, and not where a name of the Hub is looked for."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(data)
    if missing:
        (data / missing).unlink()
        seal_as_it_is(data)
    named = ["--tokenizer", "cosmos_cv"] if missing == "manifest.json" else []
    error = wrong_use(guard, inspect.main, [str(data), *named])
    named = "decoder.jit" if missing == "tokenizer.safetensors" else "--tokenizer-path"
    assert error.count("\n") == 1 and named in error
    assert not mark.exists()


def test_pipeline_runs_no_program_of_the_checkpoint(one_rank, tmp_path, mark):
    folder = copy_run(tmp_path / "run")
    poison(folder, mark)
    reseal(folder)
    pipe = Pipeline.from_checkpoint(tmp_path / "run")
    refused("--tokenizer-path", pipe, ["a"], height=32, width=32, num_video_frames=1, num_steps=2)
    assert not mark.exists()


def test_program_that_the_user_names_runs(data, tmp_path, mark):
    """So the attack above is a live one."""
    save_program(tmp_path / "mine", mark)
    assert guard(inspect.main, [str(data), "--tokenizer-path", str(tmp_path / "mine"), "--samples", "1"]) == 0
    assert mark.exists()
