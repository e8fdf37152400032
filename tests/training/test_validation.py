"""Samples at validation: of which captions, in which layouts, and what happens without a decoder."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dfm_nb import parallel
from dfm_nb.base import video
from dfm_nb.data.adoption import index_dataset
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request
from dfm_nb.training.validation import CAPTIONS
from tests import tiny_run
from tests.conftest import run_ranks
from tests.distributed.layouts import LAYOUTS
from tests.json_files import read_json
from workbench import Gallery

pytestmark = pytest.mark.slow
# The default recipe, which sets nothing of `validation`, made small.
SETTINGS = [*tiny_run.SIZE, "train.train_iters=2", "train.eval_interval=2", "train.eval_iters=1"]
SETTINGS += ["train.global_batch_size=2", "mixed_precision=fp32", "validation.num_steps=3"]
SETTINGS += ["dataset.use_train_split_for_val=true", "ema.sigma_rels=[0.28,0.02]"]


def _train_without_text_encoder(argv: list[str]) -> int:
    from dfm_nb.offline import minilm
    from dfm_nb.train import main

    def refuse(*_args, **_settings):
        raise AssertionError("a text encoder is not needed")

    minilm.build = refuse
    return main(argv)


def run(folder: Path, *argv: str, ranks: int = 1) -> tuple[list[Path], str]:
    """The samples of a run in `folder`, and its log."""
    argv = ("--run-dir", str(folder), *SETTINGS, *argv)
    assert run_ranks(ranks, _train_without_text_encoder, list(argv)) == [0] * ranks
    samples = sorted(p for p in (folder / "samples").glob("iter*/*") if p.suffix in (".png", ".mp4"))
    return samples, (folder / "log.txt").read_text()


def frames(sample: Path) -> np.ndarray:
    return (video.read_image(sample) if sample.suffix == ".png" else video.read_video(sample)[0]).astype(float)


@pytest.fixture(scope="module")
def alone(tiny_data, tmp_path_factory) -> Path:
    """The first sample of one process."""
    samples, _ = run(tmp_path_factory.mktemp("alone"), "--dataset-path", str(tiny_data))
    assert [p.name.partition("_")[0] for p in samples] == [f"idx={i}" for i in range(CAPTIONS)]
    return samples[0]


def test_default_samples_captions_of_the_data_beside_the_real_ones_without_a_text_encoder(tiny_data, alone):
    from dfm_nb.data.stores import ShardStore

    clip, sample = ShardStore(tiny_data, "train").read(0), alone
    said = read_json(sample.with_suffix(sample.suffix + ".json"))
    assert sample.name.startswith("idx=0_rank=0_sample.") and sample.parent.name == "iter_0000002"
    assert said["prompt"] == clip.meta["caption"] and said["caption_of"] == "train" and said["seed"] == 1234
    real = frames(sample.parents[1] / "data" / sample.name)
    assert real.shape == (clip.meta["num_frames"], clip.meta["image_height"], clip.meta["image_width"], 3)
    shown = Gallery.of_training(sample.parents[2])
    assert list(shown.columns) == ["iteration 2", "your data"] and "(a training caption)" in shown.html()


def test_a_sample_is_what_the_checkpoint_generates_for_the_same_caption(tiny_data, alone):
    """By the same average: the shortest."""
    said = read_json(alone.with_suffix(alone.suffix + ".json"))
    names = ("num_video_frames", "seed", "num_steps")
    request = Request(said["prompt"], **{name: said[name] for name in names})
    parallel.init()
    made = {ema: Pipeline.from_checkpoint(alone.parents[2], ema=ema) for ema in ("auto", 0.02, 0.28)}
    shown = {ema: next(pipe.run([request]))[1].frames.astype(float) for ema, pipe in made.items()}
    parallel.shutdown()
    assert np.abs(shown["auto"] - frames(alone)).max() <= 2
    assert (shown["auto"] == shown[0.02]).all() and np.abs(shown[0.28] - shown[0.02]).max() > 2


@pytest.mark.parametrize("name", ["PP2", "DP2 distributed optimizer"])
def test_every_replica_samples_what_one_process_does(tiny_data, alone, tmp_path, name):
    layout = LAYOUTS[name][1]
    samples, _ = run(tmp_path, "--dataset-path", str(tiny_data), *layout, ranks=2)
    ranks = [int(p.name.partition("_rank=")[2][0]) for p in samples]
    assert ranks == ([0] * CAPTIONS if layout else [0, 1] * (CAPTIONS // 2))
    assert np.abs(frames(samples[0]) - frames(alone)).max() <= 2
    prompts = [read_json(p.with_suffix(p.suffix + ".json"))["prompt"] for p in samples]
    assert len(set(prompts)) == len(prompts)


def test_data_without_decoder_or_encoder_train_with_one_notice(tiny_data, tmp_path):
    data, notice = shutil.copytree(tiny_data, tmp_path / "data"), "No samples at validation: "
    (data / "tokenizer.safetensors").unlink()
    index_dataset(data)
    samples, log = run(tmp_path / "no_decoder", "--dataset-path", str(data), "train.eval_interval=1")
    assert samples == [] and log.count(notice) == 1 and "Validation at iteration 2" in log
    _, log = run(tmp_path / "prompts", "--dataset-path", str(tiny_data), "validation.prompts=[a moth]")
    assert f"{notice}a text encoder is not needed" in log
