"""`dfm evaluate` on a model of three iterations; its faults name the fix."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb import evaluate, prepare
from dfm_nb.base.argv import guard
from dfm_nb.base.video import read_image
from dfm_nb.butterflies import wordings
from dfm_nb.butterflies.attributes import MEASURED, TOGETHER
from dfm_nb.data.sample_index import index_dataset
from dfm_nb.data.stores import ShardStore
from dfm_nb.evaluation import reference
from dfm_nb.evaluation.comparison import copies
from dfm_nb.generation import run_verdict

STEPS = ["--num-steps", "2", "--guidance", "2", "--size-px", "32"]


@pytest.mark.slow
def test_the_command_measures_images_and_clips_against_a_prepared_folder(tiny_checkpoint, tiny_data, tmp_path, capsys):
    argv = ["--checkpoint", str(tiny_checkpoint), "--dataset", str(tiny_data), *STEPS]
    argv += "--split train --num-prompts 4 --num-clips 2".split()
    argv += ["--output", str(tmp_path / "e.json"), "--contact-sheet", str(tmp_path / "e.png")]
    assert guard(evaluate.main, argv) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "e.json").read_text())
    assert result["dataset"] == {"name": str(tiny_data), "split": "train", "unreadable": 0}
    images = result["images"]
    assert images["samples"] == images["real_samples"] == 4 and images["network"] == "efficientnet_lite0"
    estimate = images["kernel_distance"]
    assert estimate["real"] < estimate["value"] and estimate["low"] < estimate["value"] < estimate["high"]
    surely = images["colour"]["sure"]
    assert 0 <= surely["low"] <= surely["share"] <= images["colour"]["argmax"]["share"] <= 1
    for kind in ("images", "clips"):
        real = result[kind]["real_renders"]
        assert {*MEASURED, *TOGETHER} == set(real["as_drawn"]) == set(real["decoded"]), real
    assert {"temporal_consistency", "wing_motion"} <= set(result["clips"]) and "temporal_consistency" not in images
    assert "| 4 images | colour |" in said and "| 2 clips | temporal consistency |" in said
    assert read_image(tmp_path / "e.png").shape[2] > 500


@pytest.mark.slow
def test_of_two_pictures_both_captions_are_sampled(tiny_checkpoint, tiny_data):
    few = {"split": "train", "num_prompts": 1, "num_clips": 0, "num_steps": 2}
    found = evaluate.evaluate_model(tiny_checkpoint, dataset=str(tiny_data), **few)
    assert len(found.samples) == found.values["images"]["samples"] == 2
    assert "kernel_distance" in found.values["images"]["not_measured"]


@pytest.mark.slow
def test_unseen_combinations_need_no_dataset_and_repeat(tiny_checkpoint, tmp_path):
    argv = ["--checkpoint-path", str(tiny_checkpoint), "--num-prompts", "6", "--num-clips", "0", *STEPS]
    argv += ["--part", "test", "--wordings", "2", "--distances"]
    results = []
    for name in ("a", "b"):
        assert guard(evaluate.main, [*argv, "--output", str(tmp_path / name)]) == 0
        results.append(json.loads((tmp_path / name).read_text()))
    assert results[0] == results[1] and results[0]["images"]["samples"] == 6 and "clips" not in results[0]
    assert set(results[0]["wordings"]) == set(wordings.forms())
    assert set(results[0]["images"]["distances"]) == {"efficientnet_lite0"}


@pytest.mark.slow
def test_what_cannot_be_measured_is_one_sentence(tiny_checkpoint, tiny_data, tmp_path, capsys):
    other = shutil.copytree(tiny_data, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(manifest))
    index_dataset(other)  # a change that is meant
    for flags, name in ((["--dataset", "nowhere"], "--dataset nowhere"), (["--dataset", str(other)], "tokenizer")):
        assert guard(evaluate.main, ["--checkpoint", str(tiny_checkpoint), *flags, *STEPS]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(errors) == 1 and name in errors[0], errors


@pytest.fixture(scope="module")
def run_and_data(tiny_checkpoint, tiny_data, tmp_path_factory):
    """A run of two checkpoints, the first one damaged at a byte, and pictures of which some are held out."""
    top = tmp_path_factory.mktemp("verdict")
    argv = "--source synthetic --num-images 24 --num-clips 0 --short-side 32 --val-fraction 0.4 --tokenizer pca".split()
    argv += ["--tokenizer-path", str(tiny_data / "tokenizer.safetensors"), "--output-dir", str(top / "data")]
    assert prepare.main(argv) == 0
    run = shutil.copytree(tiny_checkpoint, top / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(tiny_checkpoint), str(run)))
    first = shutil.copytree(run / "checkpoints" / "iter_0000003", run / "checkpoints" / "iter_0000002")
    (first / "state.json").write_bytes(b"damaged")
    return run, top / "data"


@pytest.mark.slow
def test_all_checkpoints_get_a_verdict_and_a_damaged_one_is_named(run_and_data, tmp_path, capsys, caplog):
    run, data = run_and_data
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "val_loss": 0.5}\n')
    argv = ["--checkpoint", str(run), "--dataset", str(data), "--all-checkpoints", "--num-prompts", "10", *STEPS]
    assert guard(evaluate.main, [*argv, "--json", "--contact-sheet", str(tmp_path / "c.png")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "iter_0000002" in caplog.text
    (row,) = result["checkpoints"]
    assert row["iteration"] == 3 and row["val_loss"] == 0.5 and row["copies"]["low"] <= row["copies"]["value"]
    assert result["verdict"]["take"] == 3 and {"kernel_distance", "copies"} <= result["verdict"]["real"].keys()
    assert json.loads((run / "verdict.json").read_text()) | {"exit_code": 0} == result
    assert (run / "verdict.png").exists() and (tmp_path / "c.png").exists()


@pytest.mark.slow
def test_drift_is_from_the_prompts_of_the_base_if_it_is_there(caplog):
    asked = evaluate.EvaluateOptions(checkpoint_path="runs/a", num_steps=1, guidance=1.0)
    tuned = cfg.Config()
    assert run_verdict.base_samples(asked, SimpleNamespace(config=tuned)) is None
    tuned.checkpoint.pretrained = "butterflies"
    requests, samples = run_verdict.base_samples(asked, SimpleNamespace(config=tuned))
    assert len(samples) == len(requests) == run_verdict.DRIFT_SAMPLES and {s.shape for s in samples} == {(1, 64, 64, 3)}
    assert len({r["prompt"] for r in requests}) == 2 and not np.array_equal(samples[0], samples[2]), "other noise"
    tuned.checkpoint.pretrained = "runs/gone"
    assert run_verdict.base_samples(asked, SimpleNamespace(config=tuned)) is None and "runs/gone" in caplog.text


@pytest.mark.slow
def test_a_verdict_needs_a_run_and_held_out_data(run_and_data, tmp_path, capsys):
    run, data = run_and_data
    for argv, name in (
        ([str(run)], "--dataset"),
        ([str(run), "--dataset", "synthetic"], "synthetic"),
        ([str(run), "--dataset", str(data), "--split", "train"], "train"),
        ([str(tmp_path), "--dataset", str(data)], str(tmp_path)),
        ([str(run), "--dataset", str(data), "--num-prompts", "6"], "--num-prompts"),
    ):
        assert guard(evaluate.main, ["--all-checkpoints", "--checkpoint", *argv, *STEPS]) == 2
        assert name in capsys.readouterr().err


def test_copies_of_training_samples_are_counted(monkeypatch):
    """Five of twenty samples are training latents with a little noise; one of another size is left out."""
    rng = np.random.default_rng(0)
    normal = lambda n: torch.from_numpy(rng.normal(size=(n, 2, 1, 4, 4))).float()  # noqa: E731
    stored = {"train": normal(300), "val": normal(200)}
    monkeypatch.setattr(reference, "stored_latents", lambda folder, split, grid, most: stored[split])
    fresh = torch.from_numpy(rng.normal(size=(15, 2, 1, 4, 4))).float()
    latents = [*fresh, *(stored["train"][:5] + 0.01), torch.zeros(2, 1, 2, 2)]
    samples = [SimpleNamespace(latent=x) for x in latents]
    counted = {"share": 0.25, "samples": 20, "training_samples": 300, "held_out": 200}
    assert copies(samples, "d", "val", lambda x: x) == {"memorised": counted}


@pytest.mark.slow
def test_stored_latents_are_those_of_one_size(tiny_data):
    store = ShardStore(str(tiny_data), "train")
    grid = store.grid(0)
    of_size = [i for i in range(len(store)) if store.grid(i) == grid]
    found = reference.stored_latents(str(tiny_data), "train", grid, 2)
    assert torch.equal(found, torch.stack([store.read(i).latent[0].float() for i in of_size[:2]]))
    assert len(reference.stored_latents(str(tiny_data), "train", (9, 9, 9), 2)) == 0


def test_a_source_is_drawn_from_by_the_seed_alone():
    source = reference.SourceReference("synthetic", 32)
    drawn = [reference.choose(source, 3, 1, 5, seed) for seed in (4, 4, 5)]
    captions = [[r.caption for r in images + clips] for images, clips, failed in drawn]
    assert captions[0] == captions[1] != captions[2] and all(failed == 0 for *_, failed in drawn)
    assert [len(r.frames) for r in drawn[0][0]] == [1, 1, 1] and len(drawn[0][1][0].frames) == 5
    assert drawn[0][0][0].attributes.keys() >= {"colour", "pattern", "background"}
