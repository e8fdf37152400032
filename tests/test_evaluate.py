"""`dfm evaluate`: intervals and prompts by themselves, then the command on a model of three iterations; its faults name the fix."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from dfm_nb import evaluate
from dfm_nb.base.argv import guard
from dfm_nb.base.video import read_image
from dfm_nb.data.sources import synthetic
from dfm_nb.evaluation import features, reference
from dfm_nb.evaluation.judge import chance

STEPS = ["--num-steps", "2", "--guidance", "2", "--size-px", "32"]


def test_wilson_interval_is_the_published_one():
    """9 of 10 (Brown, Cai & DasGupta 2001 give the formula; the numbers are its)."""
    assert evaluate.wilson(9, 10) == pytest.approx((0.5958, 0.9821), abs=2e-4)
    low, high = evaluate.wilson(0, 50)
    assert low == pytest.approx(0, abs=1e-12) and 0.05 < high < 0.08


def test_prompts_are_combinations_that_training_never_showed():
    triples = {tuple(sorted(t.items())) for t in synthetic.seen_combinations()}
    most = len(synthetic.unseen_combinations()) * len(synthetic.SPECIES)
    drawn = evaluate.unseen_attributes(most, "still")
    assert len({tuple(sorted(d.items())) for d in drawn}) == most
    for d in drawn:
        assert tuple(sorted((k, d[k]) for k in ("colour", "pattern", "background"))) not in triples
    with pytest.raises(
        ValueError, match=r"there are (\d+) unseen combinations to draw; got 99999; use --num-prompts \1 or fewer"
    ):
        evaluate.unseen_attributes(99_999, "still")


def test_score_counts_what_the_classifier_finds():
    wanted = [{"colour": "red", "background": "sky", "pattern": "plain"}] * 4
    found = [{**wanted[0], "colour": c} for c in ("red", "red", "red", "blue")]
    videos = [np.zeros((1, 16, 16, 3), np.uint8)] * 4
    out = evaluate.score(videos, wanted, SimpleNamespace(predict=lambda _: found))
    assert out["colour"]["accuracy"] == 0.75 and out["background"]["accuracy"] == 1 and "wing_motion" not in out
    assert (out["colour"]["low"], out["colour"]["high"]) == evaluate.wilson(3, 4)
    assert out["colour"]["chance"] == chance()["colour"]
    assert out["colour"]["found"] == {"red": {"blue": 1, "red": 3}} and out["pattern"]["found"] == {
        "plain": {"plain": 4}
    }
    out["real_renders"] = {
        "as_drawn": dict.fromkeys(evaluate.MEASURED, 1.0),
        "decoded": dict.fromkeys(evaluate.MEASURED, 0.9),
    }
    text = evaluate.table({"images": out})
    assert "| 4 images | colour | 75.0% | 30.1% - 95.4% | 12.5% | 100.0% | 90.0% |" in text.splitlines()
    assert text.splitlines()[-1] == "Images, colour by what was asked: red 3 of 4."


def test_a_perfect_model_has_the_distance_of_real_samples():
    """Samples that are the asked ones: both columns agree; blank ones are farther."""
    attributes = [
        {"species": "monarch", "posture": "open", "motion": "flapping", **c} for c in synthetic.seen_combinations()[:24]
    ]
    clips = [synthetic.render(a, i, 64, 64, 5) for i, a in enumerate(attributes)]
    asked, others = clips[:12], clips[12:]
    mean = lambda x: x.flatten(2)[:, :, ::7].flatten(1)  # noqa: E731 - some pixels are features enough here
    network = features.FeatureNetwork("pixels", mean, 16, (0.5,) * 3, (0.5,) * 3)
    same = evaluate.distances(asked, asked, others, network)
    for key in ("frechet_distance", "kernel_distance", "temporal_consistency"):
        assert same[key]["value"] == pytest.approx(same[f"{key}_real"]) and same[key]["low"] < same[key]["high"]
    blank = evaluate.distances([np.zeros_like(c) for c in asked], asked, others, network)
    for key in ("frechet_distance", "kernel_distance"):
        assert blank[key]["low"] > same[key]["value"]
    assert blank["temporal_consistency"]["value"] == pytest.approx(1) and same["temporal_consistency"]["value"] < 0.999


@pytest.mark.slow
def test_the_command_measures_images_and_clips_against_a_prepared_folder(tiny_checkpoint, tiny_data, tmp_path, capsys):
    argv = [
        "--checkpoint",
        str(tiny_checkpoint),
        "--dataset",
        str(tiny_data),
        "--split",
        "train",
        "--num-prompts",
        "4",
        "--num-clips",
        "2",
        *STEPS,
        "--output",
        str(tmp_path / "e.json"),
        "--contact-sheet",
        str(tmp_path / "e.png"),
    ]
    assert guard(evaluate.main, argv) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "e.json").read_text())
    assert result["dataset"] == {"name": str(tiny_data), "split": "train", "unreadable": 0}
    images = result["images"]
    assert images["samples"] == images["real_samples"] == 4 and images["network"] == "efficientnet_lite0"
    estimate = images["frechet_distance"]
    assert (
        0 < images["frechet_distance_real"] < estimate["value"]
        and estimate["low"] < estimate["value"] < estimate["high"]
    )
    assert 0 <= images["colour"]["low"] <= images["colour"]["accuracy"] <= images["colour"]["high"] <= 1
    for kind in ("images", "clips"):
        real = result[kind]["real_renders"]
        assert {"colour", "background", "pattern", "all"} == set(real["as_drawn"]) == set(real["decoded"]), real
    assert {"temporal_consistency", "wing_motion"} <= set(result["clips"]) and "temporal_consistency" not in images
    for part in (
        "| 4 images | colour |",
        "Frechet distance",
        "kernel distance x 1000",
        "| 2 clips (efficientnet_lite0) | temporal consistency",
    ):
        assert part in said, said
    assert len({len(re.findall(r"\|", line)) for line in said.splitlines() if "efficientnet" in line}) == 1
    assert read_image(tmp_path / "e.png").shape[2] > 500


@pytest.mark.slow
def test_unseen_combinations_need_no_dataset_and_repeat(tiny_checkpoint, tmp_path):
    argv = ["--checkpoint-path", str(tiny_checkpoint), "--num-prompts", "3", "--num-clips", "0", *STEPS]
    results = []
    for name in ("a", "b"):
        assert guard(evaluate.main, [*argv, "--output", str(tmp_path / name)]) == 0
        results.append(json.loads((tmp_path / name).read_text()))
    assert results[0] == results[1] and results[0]["images"]["samples"] == 3 and "clips" not in results[0]


@pytest.mark.slow
def test_what_cannot_be_measured_is_one_sentence(tiny_checkpoint, tiny_data, tmp_path, capsys):
    other = shutil.copytree(tiny_data, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = "0" * 64
    (other / "manifest.json").write_text(json.dumps(manifest))
    for flags, message in (
        (["--dataset", "nowhere"], "--dataset nowhere is neither a prepared folder (it has no .nv-meta) nor a source"),
        (["--dataset", str(other)], "was encoded by another tokenizer (pca) than the checkpoint's"),
        (["--dataset", str(tiny_data), "--features", "vgg"], "must be one of efficientnet_lite0, inception, dinov2"),
        (
            ["--dataset", str(tiny_data), "--split", "train", "--num-prompts", "1", "--num-clips", "0"],
            "distances need 4 or more",
        ),
    ):
        assert guard(evaluate.main, ["--checkpoint", str(tiny_checkpoint), *flags, *STEPS]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(errors) == 1 and message in errors[0], errors


def test_a_source_is_drawn_from_by_the_seed_alone():
    source = reference.RawSource("synthetic", 32)
    drawn = [reference.draw(source, 3, 1, 5, seed) for seed in (4, 4, 5)]
    captions = [[r.caption for r in images + clips] for images, clips, failed in drawn]
    assert captions[0] == captions[1] != captions[2] and all(failed == 0 for *_, failed in drawn)
    assert [len(r.frames) for r in drawn[0][0]] == [1, 1, 1] and len(drawn[0][1][0].frames) == 5
    assert drawn[0][0][0].attributes.keys() >= {"colour", "pattern", "background"}
