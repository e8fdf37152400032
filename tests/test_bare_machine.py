"""A machine without libGL and libEGL prepares, trains and generates; only drawing butterflies needs them."""

import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

SCRIPT = """
import dfm_nb
from dfm_nb.butterflies import synthetic
dfm_nb.prepare_dataset(source="folder:pictures", output_dir="data", short_side=32)
settings = {"train.train_iters": 1, "train.global_batch_size": 1, "dataset.task_encoder_seq_length": 64}
run = dfm_nb.train_model(dataset_path="data", run_dir="run", model="tiny", overrides=settings)
clips = dfm_nb.Pipeline.from_checkpoint(run)(["a square"], height=32, width=32, num_steps=2)
print("frames", clips[0].frames.shape)
try:
    synthetic.render(synthetic.unseen_combinations()[0] | {"species": "monarch", "posture": "open"}, 0, 32, 32)
except FileNotFoundError as error:
    print("drawing:", error)
"""
HIDDEN = "for lib in /lib/*/libEGL.so.1 /lib/*/libGL.so.1 /usr/lib/*/lib{EGL,GL}.so.1; do "
HIDDEN += '[ ! -e "$lib" ] || mount --bind /dev/null "$lib" || exit 9; done; '


@pytest.mark.slow
def test_all_but_drawing_works_without_libgl(tmp_path):
    (tmp_path / "pictures").mkdir()
    rng = np.random.default_rng(0)
    for i in range(4):
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(tmp_path / f"pictures/square {i}.png")
    argv = [sys.executable, "-c", SCRIPT]
    if shutil.which("unshare") and not subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        argv = ["unshare", "-m", "bash", "-c", HIDDEN + shlex.join(argv)]  # as bare as a slim image
    else:
        (tmp_path / "skia.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "frames (1, 32, 32, 3)" in done.stdout and "drawing:" in done.stdout and "libgl1" in done.stdout
