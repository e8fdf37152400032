"""The core is what its three verbs import, and the plug-ins that the registry loads for them."""

import json
import subprocess
import sys

import pytest

from dfm_nb.base import installed
from scripts.house_figures import CORE_ROOTS, core, package
from tests.docs.docs_pages import ROOT

SCRIPT = """
import json, sys
import numpy as np
from PIL import Image
from dfm_nb import cli
for i in range(4):
    Image.fromarray(np.full((32, 32, 3), 60 * i, np.uint8)).save(f"square {i}.png")
cli.main("prepare --source folder:. --output-dir data --short-side 32 --tokenizer pca --text-encoder minilm".split())
small = "train.train_iters=1 train.global_batch_size=1 dataset.task_encoder_seq_length=64".split()
cli.main(["pretrain", "--dataset-path=data", "--run-dir=run", "--model=tiny", *small])
one = "--height 32 --width 32 --num-steps 2 --video-save-path a.png".split()
cli.main(["generate", "--checkpoint-path=run", "--prompt=a square", *one])
print(json.dumps([name for name in sys.modules if name.startswith("dfm_nb.")]))
"""
LOADED = ("sources", "tokenizers", "text_encoders", "networks", "pretrained")
"""Kinds of plug-ins that a verb loads for flags and names; `exams`, `displays` and other verbs it leaves alone."""


@pytest.mark.slow
def test_the_three_verbs_load_the_core_and_plug_ins_alone(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "a.png").is_file(), done.stderr
    points = [point for kind in LOADED for point in installed.entry_points(f"dfm_nb.{kind}")]
    files = package(ROOT)
    allowed = core(files, [*CORE_ROOTS, *(point.module for point in points)])
    reached = {name for name in json.loads(done.stdout.splitlines()[-1]) if name in files}
    modules = {name for name in reached if files[name].name != "__init__.py"}  # a package's file says what it is
    assert modules - allowed == {"dfm_nb.cli"}
    assert core(files) <= reached, "all of the closure is needed"
