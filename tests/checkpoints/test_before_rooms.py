"""Data and a run written by commit 030c6d2, the last one before the package got rooms, open and go on.

`before_rooms/` was made there, on one process, with `dfm prepare --source synthetic --num-images 10 --num-clips 2
--short-side 32 --tokenizer pca` and `dfm pretrain` with the settings of its `config.yaml` (demo recipe: Muon, EMA,
packed clips). The run went on to iteration 6; its checkpoint of iteration 3 is kept, and `metrics.jsonl` has all six
losses.
"""

import shutil
from pathlib import Path

import pytest
import torch

from dfm_nb.base.metrics import read_metrics
from dfm_nb.checkpoints import weights as checkpoint
from tests.conftest import run_ranks
from tests.tiny_run import _train

BEFORE = Path(__file__).parent / "before_rooms"
WRITTEN_ON = ("AVX512", "2.13.0+cpu")
"""CPU capability and torch of the machine that wrote the fixture: elsewhere sums round differently."""


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Metrics of iterations 4 to 6, resumed today from the checkpoint of iteration 3: (expected, found)."""
    folder = tmp_path_factory.mktemp("before_rooms")
    shutil.copytree(BEFORE, folder, dirs_exist_ok=True)
    expected = read_metrics(folder / "run" / "metrics.jsonl")
    settings = folder / "run" / "config.yaml"
    argv = ["--config-file", str(settings), "--dataset-path", str(folder / "data"), "--run-dir", str(folder / "run")]
    assert run_ranks(1, _train, argv) == [0]
    return expected, read_metrics(folder / "run" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["loss", "grad_norm", "lr", "samples", "val_loss", "val_loss_by_sigma", "val_loss_ema_0.05"]
)
def test_resumed_run_continues_as_it_did(records, name):
    expected, found = ([r[name] for r in rs if r["iteration"] > 3 and name in r] for rs in records)
    assert len(expected) == (3 if name in ("loss", "grad_norm", "lr", "samples") else 1)
    if (torch.backends.cpu.get_cpu_capability(), torch.__version__) == WRITTEN_ON:
        assert found == expected
    else:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def test_checkpoint_without_statistics_of_its_own_has_its_manifests():
    folder = BEFORE / "run" / "checkpoints" / "iter_0000003"
    manifest, statistics = checkpoint.read_manifest(folder), checkpoint.read_statistics(folder)
    assert torch.equal(statistics.mean, torch.tensor(manifest["latent_mean"]))
    assert torch.equal(statistics.std, torch.tensor(manifest["latent_std"]))
