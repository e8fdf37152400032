"""The core is what its three verbs import, and the plug-ins that the registry loads for them. A machine without libGL
and libEGL has enough for them; only drawing butterflies needs those.
"""

import json
import shlex
import shutil
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
from dfm_nb.butterflies import synthetic
try:
    synthetic.render(synthetic.unseen_combinations()[0] | {"species": "monarch", "posture": "open"}, 0, 32, 32)
except FileNotFoundError as error:
    print("drawing:", error)
"""
HIDDEN = "for lib in /lib/*/libEGL.so.1 /lib/*/libGL.so.1 /usr/lib/*/lib{EGL,GL}.so.1; do "
HIDDEN += '[ ! -e "$lib" ] || mount --bind /dev/null "$lib" || exit 9; done; '
LOADED = "sources tokenizers text_encoders networks pretrained loggers plots displays".split()
"""Kinds of plug-ins that these verbs load; `exams`, `dials` and other verbs they leave alone."""


@pytest.mark.slow
def test_the_three_verbs_load_the_core_and_plug_ins_alone_and_need_no_libgl(tmp_path):
    argv = [sys.executable, "-c", SCRIPT]
    if shutil.which("unshare") and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        argv = ["unshare", "-m", "bash", "-c", HIDDEN + shlex.join(argv)]  # as bare as a slim image
    else:
        (tmp_path / "skia.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "a.png").is_file(), done.stderr
    *_, loaded, drawing = done.stdout.splitlines()
    assert drawing.startswith("drawing:") and "libgl1" in drawing
    points = [point for kind in LOADED for point in installed.entry_points(f"dfm_nb.{kind}")]
    files = package(ROOT)
    allowed = core(files, [*CORE_ROOTS, *(point.module for point in points)])
    reached = {name for name in json.loads(loaded) if name in files}
    modules = {name for name in reached if files[name].name != "__init__.py"}  # a package's file says what it is
    assert modules - allowed == {"dfm_nb.cli"}
    assert core(files) <= reached, "all of the closure is needed"
