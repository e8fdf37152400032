"""Loading a checkpoint runs no code, whatever its files say. Each attack would make a file."""

import json
import operator
import pickle
import re
from pathlib import Path

import pytest
import torch

from dfm_nb.checkpoints import folders, loading, saving
from dfm_nb.config.schema import marked
from tests.attacks.checkpoint_files import NAME, WEIGHT, Evil, reseal
from tests.distributed.layouts import make_trainer
from tests.json_files import change_json
from tests.refusals import refused


def trainer_like(run: Path):
    from dfm_nb import config as cfg

    c = cfg.from_yaml(run / "config.yaml").config
    same = [f"{k}={json.dumps(operator.attrgetter(k)(c))}" for k in marked("shape")]
    muon = [f"optimizer.optimizer={c.optimizer.optimizer}", "optimizer.use_distributed_optimizer=false"]
    return make_trainer([*same, *muon, f"ema.sigma_rels={list(c.ema.sigma_rels)}".replace(" ", "")])[0]


def generate(run: Path) -> None:
    from dfm_nb.generation.pipeline import Pipeline

    Pipeline.from_checkpoint(run)


def resume(run: Path) -> None:
    saving.load(trainer_like(run).pieces(), run / "checkpoints" / NAME)


def pretrained(run: Path) -> None:
    loading.load_pretrained(trainer_like(run), run)


WAYS = [generate, resume, pretrained]


def check_refused(way, run: Path, mark: Path) -> None:
    refused("", way, run)
    assert not mark.exists()


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_stored_checkpoint_opens_every_way(one_rank, run, way):
    way(run)


FORGED = [("tokenizer", [1]), ("tokenizer", "pca"), ("text_encoder", None), ("latent_std", [None])]


@pytest.mark.parametrize("key, value", FORGED, ids=str)
def test_manifest_of_other_types_is_one_sentence(run, key, value):
    path = run / "checkpoints" / NAME / "manifest.json"
    change_json(path, {key: value})
    refused(rf"manifest.json.*{key}", folders.read_manifest, path.parent, error=folders.CheckpointError)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_pickle_in_place_of_the_tensors_runs_nothing(one_rank, run, tmp_path, way):
    folder = run / "checkpoints" / NAME
    torch.save({WEIGHT: Evil(tmp_path / "ran")}, folder / "rank-00000.safetensors")
    reseal(folder)
    check_refused(way, run, tmp_path / "ran")


@pytest.mark.parametrize(
    "key, value", [("num_layers", 2 * 10**9), ("hidden_size", 65536), ("ffn_hidden_size", 10**9), ("text_dim", None)]
)
def test_configuration_of_a_larger_network_is_refused_before_one_is_built(run, key, value):
    folder = run / "checkpoints" / NAME
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(rf"(\n  {key}:).*", rf"\1 {json.dumps(value)}", text))
    reseal(folder)
    refused("parameters", loading.find_weights, run, error=folders.CheckpointError)


@pytest.mark.parametrize("content", [pickle.dumps(1), b"[" * 100_000])
def test_odd_state_is_one_sentence(one_rank, run, content):
    folder = run / "checkpoints" / NAME
    (folder / "state.json").write_bytes(content)
    reseal(folder)
    refused("state.json", folders.verify, folder, error=folders.CheckpointError)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_exported_file_that_is_a_pickle_runs_nothing(one_rank, tmp_path, suffix):
    file = tmp_path / f"model{suffix}"
    torch.save({WEIGHT: Evil(tmp_path / "ran")}, file)
    check_refused(generate, file, tmp_path / "ran")
    file.write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    check_refused(generate, file, tmp_path / "ran")


@pytest.mark.parametrize("change", [{"optimizer_step": None}, {"optimizer_step": "5"}, {"scheduler": []}])
def test_state_of_other_types_is_refused(one_rank, run, change):
    path = run / "checkpoints" / NAME / "state.json"
    change_json(path, change)
    with pytest.raises((TypeError, ValueError, RuntimeError)):  # `training.loop` puts it into a sentence
        resume(run)
