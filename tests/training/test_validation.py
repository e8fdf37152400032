"""Samples at validation: of which captions, in which layouts, and what happens without a decoder."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dfm_nb.base import video
from tests import tiny_run
from tests.conftest import run_ranks
from tests.distributed.layouts import LAYOUTS
from tests.tiny_run import VARIANTS

pytestmark = pytest.mark.slow
# The default recipe, which sets nothing of `validation`, made small.
SETTINGS = [*tiny_run.SIZE, "train.train_iters=2", "train.eval_interval=2", "train.eval_iters=1"]
SETTINGS += ["train.global_batch_size=2", "mixed_precision=fp32", "validation.num_steps=3"]
SETTINGS += ["dataset.use_train_split_for_val=true"]


def _train_without_text_encoder(argv: list[str]) -> int:
    from dfm_nb.data.text_encoders import minilm
    from dfm_nb.train import main

    def refuse(*_args, **_settings):
        raise AssertionError("a text encoder is not needed")

    minilm.build = refuse
    return main(argv)


def run(folder: Path, *argv: str, ranks: int = 1) -> tuple[list[Path], str]:
    """The samples of a run in `folder`, and its log."""
    argv = ("--run-dir", str(folder), *SETTINGS, *argv)
    assert run_ranks(ranks, _train_without_text_encoder, list(argv)) == [0] * ranks
    samples = sorted(p for p in (folder / "samples").glob("*/*") if p.suffix in (".png", ".mp4"))
    return samples, (folder / "log.txt").read_text()


def frames(sample: Path) -> np.ndarray:
    return (video.read_image(sample) if sample.suffix == ".png" else video.read_video(sample)[0]).astype(float)


@pytest.fixture(scope="module", params=VARIANTS)
def alone(request, tiny_data, tmp_path_factory) -> tuple[Path, list[str]]:
    """The sample of one process, and the settings of its network."""
    variant = VARIANTS[request.param]
    (sample,), _ = run(tmp_path_factory.mktemp("alone"), "--dataset-path", str(tiny_data), *variant)
    return sample, variant


def test_default_samples_a_validation_caption_at_its_size_without_a_text_encoder(tiny_data, alone):
    from dfm_nb.data.stores import EnergonStore

    clip, (sample, _) = EnergonStore(tiny_data, "train").read(0), alone
    said = json.loads(sample.with_suffix(sample.suffix + ".json").read_text())
    assert sample.name.startswith("idx=0_rank=0_sample.") and sample.parent.name == "iter_0000002"
    assert said["prompt"] == clip.meta["caption"] and said["fps"] == clip.meta["fps"]
    size = clip.meta["num_frames"], clip.meta["image_height"], clip.meta["image_width"], 3
    assert frames(sample).shape == size and said["seed"] == 1234


@pytest.mark.parametrize(
    ("alone", "name"),
    [*(("dit", name) for name in ("TP2+SP", "CP2", "PP2", "DP2 distributed optimizer")), ("wan", "TP2+SP")],
    indirect=["alone"],
)
def test_every_replica_samples_what_one_process_does(tiny_data, alone, tmp_path, name):
    (want, variant), (_, layout) = alone, LAYOUTS[name]
    samples, _ = run(tmp_path, "--dataset-path", str(tiny_data), *variant, *layout, ranks=2)
    assert [p.name.partition("_rank")[0] for p in samples] == (["idx=0"] if layout else ["idx=0", "idx=1"])
    assert np.abs(frames(samples[0]) - frames(want)).max() <= 2
    prompts = [json.loads(p.with_suffix(p.suffix + ".json").read_text())["prompt"] for p in samples]
    assert len(set(prompts)) == len(prompts)


def test_data_without_decoder_or_manifest_and_mock_data_train_with_one_notice(tiny_data, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    (data / "tokenizer.safetensors").unlink()
    given = ["--dataset-path", str(data), "train.eval_interval=1"]
    samples, log = run(tmp_path / "no_decoder", *given)
    assert samples == [] and log.count("No samples at validation: ") == 1 and "Validation at iteration 2" in log
    _, log = run(tmp_path / "off", *given, "validation.samples=false")
    assert "No samples" not in log
    (data / "manifest.json").unlink()
    _, log = run(tmp_path / "no_manifest", *given)
    assert log.count("No samples at validation: ") == 1 and "has no manifest.json" in log
    _, log = run(tmp_path / "mock", "--mock", "train.eval_interval=1", ranks=2)
    assert log.count("No samples at validation: random latents (dataset.mock) have no decoder") == 1
    _, log = run(tmp_path / "prompts", "--dataset-path", str(tiny_data), "validation.prompts=[a moth]")
    assert "No samples at validation: a text encoder is not needed" in log
