"""The Python API: names, keywords as the flags, objects and tables; one process used for all of it."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from dfm_nb import plan_layouts, prepare_dataset, read_metrics, train_model
from dfm_nb.base.video import read_video
from dfm_nb.butterflies import synthetic
from dfm_nb.config import notation
from dfm_nb.generation.request import Request, requests_of_keywords
from tests import tiny_run
from tests.frames import black
from tests.json_files import read_json
from tests.processes import commands
from tests.refusals import refused

OVERRIDES = {key: notation.read(value) for key, _, value in (word.partition("=") for word in tiny_run.SIZE)}


def test_unknown_keywords_name_the_nearest():
    refused("'gpus'", plan_layouts, "DiT-S", gpu=2)
    refused("'num_inference_steps'", requests_of_keywords, ["a"], {"num_inference_step": 3})


# ---- requests -----------------------------------------------------------------------------------------------------


def test_names_of_diffusers_are_ours():
    there = {"num_inference_steps": 4, "num_frames": np.int64(5), "guidance_scale": 2}
    (ours,) = requests_of_keywords(["a"], {"num_steps": 4, "num_video_frames": 5, "guidance": 2.0, "seed": 7})
    (theirs,) = requests_of_keywords(["a"], {**there, "generator": torch.Generator().manual_seed(7)})
    assert ours == theirs and set(Request.aliases.values()) <= set(Request.model_fields)
    seeds = [torch.Generator().manual_seed(s) for s in (3, 4)]
    assert [r.seed for r in requests_of_keywords(["a", "b"], {"generator": seeds})] == [3, 4]
    refused("got 2", requests_of_keywords, ["a"], {"generator": seeds})
    refused("num_inference_steps", requests_of_keywords, ["a"], {"num_steps": 4, "num_inference_steps": 4})


# ---- a DataFrame as the source ------------------------------------------------------------------------------------


def test_a_dataframe_is_a_source_with_paths_images_arrays_and_bytes(tmp_path, monkeypatch):
    pictures = [next(synthetic.build(num_images=5, num_clips=0, size_px=32).read(i)).video[0] for i in range(5)]
    monkeypatch.chdir(tmp_path)
    Image.fromarray(pictures[0]).save("relative.png")
    transparent = Image.fromarray(pictures[1]).convert("RGBA")
    Image.fromarray(pictures[3]).save("bytes.png")
    clip = black(5, 32, 32)
    values = ["relative.png", transparent, pictures[2], {"bytes": (tmp_path / "bytes.png").read_bytes()}, clip]
    columns = {"image": values, "text": [f"picture {i}" for i in range(5)], "other": 1.5}
    frame = pd.DataFrame(columns, index=list("abcde"))
    made = prepare_dataset(frame, output_dir="data", short_side=32, val_fraction=0)
    assert made["counts"]["samples"] == 4 and made["source"]["table"] == "dataframe"
    (drop,) = made.drops.itertuples()
    assert drop.reason == "unreadable_image" and "row 5 of dataframe" in drop.detail
    assert "4 samples" in repr(made) and read_json(tmp_path / "data" / "manifest.json") == made
    again = prepare_dataset(frame, output_dir="data", short_side=32, val_fraction=0, resume=True)
    assert again == made
    refused("parquet", prepare_dataset, frame, output_dir="more", num_processes=2)
    refused("rows", prepare_dataset, frame[:0], output_dir="none")


# ---- the whole way, in one process --------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_twice_in_a_process_and_generating_between_and_after(tmp_path):
    code = f"""
import signal, dfm_nb
from dfm_nb import Pipeline, prepare_dataset, train_model
handler = signal.getsignal(signal.SIGTERM)
data = prepare_dataset(output_dir="data", num_images=12, num_clips=2, short_side=32)
settings = {OVERRIDES!r}
both = {{"dataset_path": data, "recipe": "demo"}}
first = train_model(run_dir="first", overrides=settings, **both)
pipe = Pipeline.from_checkpoint(first)
wanted = {{"num_steps": 2, "num_frames": 5, "height": 32, "width": 48}}
before = pipe(["a moth", "a bee"], **wanted)
second = train_model(run_dir="second", overrides={tiny_run.SIZE!r}, **both)
longer = train_model(run_dir="first", overrides={{**settings, "train.train_iters": 4}}, **both)
after = pipe(["a moth", "a bee"], **wanted)
assert signal.getsignal(signal.SIGTERM) is handler
assert (before.array() == after.array()).all()
assert first.metrics.loss[:3].tolist() == second.metrics.loss[:3].tolist()
print(longer, after.save("clips"), pipe("a moth", **wanted)[0].save("one.mp4", latent=True), after)
"""
    done = commands().run("python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0 and "Warning" not in done.stderr.replace("UserWarning: Apex", ""), done.stderr
    assert read_metrics(tmp_path / "first").iteration.tolist() == [1, 2, 3, 4]
    assert sorted(p.name for p in (tmp_path / "clips").iterdir()) == ["0.mp4", "0.mp4.json", "1.mp4", "1.mp4.json"]
    assert read_video(tmp_path / "one.mp4")[0].shape == (5, 32, 48, 3) and (tmp_path / "one.mp4.safetensors").is_file()


@pytest.mark.slow
def test_more_processes_are_torchrun(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(commands().path / "python"))
    how = {"recipe": "demo", "overrides": {**OVERRIDES, "train.global_batch_size": 2}, "num_processes": 2}
    run = train_model(dataset_path=tiny_data, run_dir=tmp_path / "r", **how)
    assert len(run.metrics) == 3 and run.config.get("train.global_batch_size") == 2
    with pytest.raises(RuntimeError, match="exit code 2"):
        train_model(dataset_path=tiny_data, run_dir=tiny_data, **how)
