"""Static plots: what a user names is text."""

import os
import subprocess
import sys

import pytest
from PIL import Image

from dfm_nb.base.run import Run
from dfm_nb.display import plots


def test_dollars_in_a_name_are_no_formula(tmp_path):
    run = Run.create(tmp_path / (r"run $a_{$ b\x" + "\udcff"))
    run.metrics_file.write_text("".join(f'{{"iteration": {i}, "loss": 1.0}}\n' for i in range(3)))
    plots.plot_loss(run)
    assert Image.open(run.path / "loss.png").width > 100


@pytest.mark.parametrize("found", ["bytes", "pipe", "settings"])
def test_a_matplotlibrc_of_the_current_folder_is_not_opened(tmp_path, found):
    if found == "pipe":
        os.mkfifo(tmp_path / "matplotlibrc")
    else:
        content = {"bytes": b"\xff\xd7", "settings": b"text.usetex: True\nsavefig.facecolor: black\n"}[found]
        (tmp_path / "matplotlibrc").write_bytes(content)
    drawing = (
        "from dfm_nb.display import plots; plots.save(plots.blank(1, 1), 'a.png')"  # as every plot begins and ends
    )
    subprocess.run([sys.executable, "-c", drawing], cwd=tmp_path, check=True, timeout=60)
    assert Image.open(tmp_path / "a.png").convert("L").getpixel((0, 0)) == 255
