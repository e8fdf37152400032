"""`dfm evaluate` on a model of three iterations; its faults name the fix."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from dfm_nb import config as cfg
from dfm_nb import prepare_dataset
from dfm_nb.base import video
from dfm_nb.base.argv import guard
from dfm_nb.base.video import read_image
from dfm_nb.butterflies import exam, synthetic, wordings
from dfm_nb.butterflies.exam import MEASURED, TOGETHER
from dfm_nb.checkpoints import folders
from dfm_nb.data.adoption import index_dataset
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.measure import evaluate, reference, run_verdict
from tests import tiny_run
from tests.json_files import read_json, write_json

pytestmark = pytest.mark.slow

STEPS = "--num-steps 2 --guidance 2 --size-px 32".split()


@pytest.fixture(autouse=True)
def few_renders(monkeypatch):
    monkeypatch.setattr(exam, "MOST_RENDERS", {"images": 6, "clips": 4})
    monkeypatch.setattr(exam, "ONE_PROMPT", 2)


def test_the_command_measures_images_and_clips_against_a_prepared_folder(tiny_checkpoint, tiny_data, tmp_path, capsys):
    argv = ["--checkpoint", str(tiny_checkpoint), "--dataset", str(tiny_data), *STEPS]
    argv += "--split train --num-prompts 4 --num-clips 2".split()
    argv += ["--output", str(tmp_path / "e.json"), "--contact-sheet", str(tmp_path / "e.png")]
    assert guard(evaluate.main, argv) == 0
    said = capsys.readouterr().out
    result = read_json(tmp_path / "e.json")
    about = result["dataset"]
    assert (about["name"], about["split"], about["unreadable"]) == (str(tiny_data), "train", 0)
    images = result["images"]
    assert images["samples"] == 4 and images["network"] == "efficientnet_lite0"
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


def test_a_model_of_pairs_is_asked_with_what_is_given(tmp_path, monkeypatch):
    """All pairs have one caption; what is given makes a held-out one unseen."""
    looks = synthetic.seen_combinations()[:24]
    for i, look in enumerate(looks):
        for suffix, seed in (("", i), (".source", 100 + i)):
            video.write_png(tmp_path / f"set/{i}{suffix}.png", synthetic.render(look, seed, 32, 32)[0])
        (tmp_path / f"set/{i}.txt").write_text("turn it a little")
    how = {"tokenizer": "pca", "short_side": 32, "val_fraction": 0.25}
    prepare_dataset(f"folder:{tmp_path / 'set'}", output_dir=tmp_path / "data", **how)
    run = tiny_run.train(tmp_path / "data", tmp_path / "run", "train.eval_interval=3", "validation.num_steps=2")
    assert list((run / "samples/given").glob("*.png")), "validation gives them too"
    asked, generate = [], Pipeline.run
    monkeypatch.setattr(
        Pipeline, "run", lambda pipe, requests, **kw: generate(pipe, asked.extend(requests) or requests, **kw)
    )
    result = evaluate.evaluate_model(run, dataset=tmp_path / "data", num_steps=2)
    unseen = result.values["images"]["samples"]
    assert unseen > 1 and not result.values["dataset"]["seen_caption"]
    assert all(len(request.given) == 1 for request in asked) and len({request.given for request in asked}) == len(asked)


def test_without_flags_unseen_captions_and_training_ones_are_asked_as_generate_does(tiny_checkpoint, tmp_path):
    """Of 24 held-out pictures one has a caption of training and one a picture of training."""
    draw = [
        synthetic.render(a, i, 32, 48 if i % 2 else 32)[0] for i, a in enumerate(synthetic.seen_combinations()[:30])
    ]
    for i, frame in enumerate(draw):
        video.write_png(tmp_path / "set" / ("train" if i < 6 else "val") / f"{i}.png", frame)
    video.write_png(tmp_path / "set/val/again.png", video.resize(draw[1][None], 64, 96)[0])
    words = {f"train/{i}.png": f"moth {i}" for i in range(6)} | {f"val/{i}.png": f"moth {i}" for i in range(6, 30)}
    rows = words | {"val/9.png": "Moth  4", "val/again.png": "once more"}
    (tmp_path / "set/captions.csv").write_text("file,caption\n" + "".join(f"{f},{c}\n" for f, c in rows.items()))
    data = str(tmp_path / "data")
    how = {"tokenizer": "pca", "tokenizer_path": tiny_checkpoint / "checkpoints/iter_0000003", "short_side": 32}
    prepare_dataset(f"folder:{tmp_path}/set", output_dir=data, **how)
    found = evaluate.evaluate_model(tiny_checkpoint, dataset=data, num_steps=1, guidance=1.0)
    values, pipe = found.values, Pipeline.from_checkpoint(tiny_checkpoint)
    assert values["images"]["samples"] == 23 and values["training images"]["samples"] == 6
    assert len(values["dataset"]["seen_caption"]) == len(values["dataset"]["seen_picture"]) == 1
    assert values["images"]["copies"]["real"] >= 1 / 23, "by the quantile of 23 unseen ones"
    own = [name for name in values if name.endswith(run_verdict.OWN)]
    assert own and all(values[name]["samples"] == values[name.removesuffix(run_verdict.OWN)]["samples"] for name in own)
    ((real, made), caption) = next(pairs for title, pairs in found.samples.items() if title.startswith("Training"))[0]
    assert real.shape[0] == 1 and (made == pipe(caption, num_steps=1, guidance=1.0, num_frames=1)[0].frames).all()
    assert found.contact_sheet().shape[1] > 1500 and "23 unseen images" in str(found)


def test_unseen_combinations_need_no_dataset_and_repeat(tiny_checkpoint, tmp_path, caplog, monkeypatch):
    """A model of other data is asked for them too, with a warning."""
    argv = ["--checkpoint-path", str(tiny_checkpoint), "--num-prompts", "6", "--num-clips", "0", *STEPS]
    argv += "--part test --wordings 2 --distances".split()
    results = []
    for name in ("a", "b"):
        assert guard(evaluate.main, [*argv, "--output", str(tmp_path / name)]) == 0
        results.append(read_json(tmp_path / name))
    assert results[0] == results[1] and results[0]["images"]["samples"] == 6 and "clips" not in results[0]
    assert set(results[0]["wordings"]) == set(wordings.FORMS)
    assert set(results[0]["images"]["distances"]) == {"efficientnet_lite0"} and "--dataset" not in caplog.text
    of_others = {
        **folders.read_manifest(Pipeline.from_checkpoint(tiny_checkpoint).folder),
        "source": {"name": "folder"},
    }
    monkeypatch.setattr(folders, "read_manifest", lambda folder: of_others)
    assert guard(evaluate.main, [*argv[:2], "--num-prompts", "1", "--num-clips", "0", *STEPS]) == 0
    assert "--dataset" in caplog.text


@pytest.fixture(scope="module")
def run_and_data(tiny_checkpoint, tiny_data, tmp_path_factory):
    """A run of two checkpoints, the first one damaged at a byte, and pictures of which some are held out."""
    top = tmp_path_factory.mktemp("verdict")
    how = {"tokenizer": "pca", "tokenizer_path": tiny_data / "tokenizer.safetensors", "short_side": 32}
    prepare_dataset("synthetic", output_dir=top / "data", num_images=24, num_clips=0, val_fraction=0.4, **how)
    run = shutil.copytree(tiny_checkpoint, top / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(tiny_checkpoint), str(run)))
    first = shutil.copytree(run / "checkpoints" / "iter_0000003", run / "checkpoints" / "iter_0000002")
    (first / "state.json").write_bytes(b"damaged")
    return run, top / "data"


def test_all_checkpoints_get_a_verdict_and_a_damaged_one_is_named(run_and_data, tmp_path, capsys, caplog):
    run, data = run_and_data
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "val_loss": 0.5}\n')
    argv = ["--checkpoint", str(run), "--dataset", str(data), "--all-checkpoints", "--num-prompts", "10", *STEPS]
    assert guard(evaluate.main, [*argv, "--json", "--contact-sheet", str(tmp_path / "c.png")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "iter_0000002" in caplog.text and "other data" in caplog.text  # prepared apart from those of the run
    (row,) = result["checkpoints"]
    assert row["iteration"] == 3 and row["val_loss"] == 0.5 and row["copies"]["low"] <= row["copies"]["value"]
    assert result["verdict"]["take"] == 3 and {"kernel_distance", "copies"} <= result["verdict"]["real"].keys()
    assert read_json(run / "verdict.json") | {"exit_code": 0} == result
    assert (run / "verdict.png").exists() and (tmp_path / "c.png").exists()


def test_drift_is_from_the_prompts_of_the_base_if_it_is_there(caplog):
    asked = evaluate.EvaluateOptions(checkpoint_path="runs/a", num_steps=1, guidance=1.0)
    tuned = cfg.Config()
    assert run_verdict.base_samples(asked, SimpleNamespace(config=tuned, source=None)) is None
    tuned.checkpoint.pretrained = "butterflies"
    requests, samples = run_verdict.base_samples(asked, SimpleNamespace(config=tuned, source=None))
    assert len(samples) == len(requests) == run_verdict.DRIFT_SAMPLES and {s.shape for s in samples} == {(1, 64, 64, 3)}
    assert len({r["prompt"] for r in requests}) == 2 and not np.array_equal(samples[0], samples[2]), "other noise"
    tuned.checkpoint.pretrained = "runs/gone"
    assert (
        run_verdict.base_samples(asked, SimpleNamespace(config=tuned, source=None)) is None
        and "runs/gone" in caplog.text
    )


def test_what_cannot_be_measured_is_one_sentence(run_and_data, tiny_checkpoint, tiny_data, tmp_path, capsys):
    run, data = run_and_data
    other = shutil.copytree(tiny_data, tmp_path / "other")
    manifest = read_json(other / "manifest.json")
    manifest["tokenizer"]["sha256"] = "0" * 64
    write_json(other / "manifest.json", manifest)
    index_dataset(other)  # a change that is meant
    every = ["--all-checkpoints", "--dataset"]
    for checkpoint, flags, name in (
        (tiny_checkpoint, ["--dataset", "nowhere"], "--dataset nowhere"),
        (tiny_checkpoint, ["--dataset", str(other)], "tokenizer"),
        (run, every[:1], "--dataset"),
        (run, [*every, "synthetic"], "synthetic"),
        (run, [*every, str(data), "--split", "train"], "train"),
        (tmp_path, [*every, str(data)], str(tmp_path)),
        (run, [*every, str(data), "--num-prompts", "6"], "--num-prompts"),
    ):
        assert guard(evaluate.main, ["--checkpoint", str(checkpoint), *flags, *STEPS]) == 2
        (error,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error"))
        assert name in error


def test_a_source_is_drawn_from_by_the_seed_alone():
    source = reference.open_reference("synthetic", None, None, 32)
    drawn = [reference.choose(source, 3, 1, 5, seed) for seed in (4, 4, 5)]
    captions = [[r.caption for r in images + clips] for images, clips, failed in drawn]
    assert captions[0] == captions[1] != captions[2] and not any(failed for *_, failed in drawn)
    assert [len(r.frames) for r in drawn[0][0]] == [1, 1, 1] and len(drawn[0][1][0].frames) == 5
    assert drawn[0][0][0].attributes.keys() >= {"colour", "pattern", "background"}
