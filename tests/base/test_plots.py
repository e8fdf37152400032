"""Static plots: what a user names is text."""

import os
import subprocess
import sys

import pytest
from PIL import Image

from dfm_nb.base import plots


def test_dollars_in_a_name_are_no_formula(tmp_path):
    plots.plot_loss(
        [{"iteration": i, "loss": 1.0} for i in range(3)], tmp_path / "a.png", title=r"run $a_{$ b\x" + "\udcff"
    )
    assert Image.open(tmp_path / "a.png").width > 100


@pytest.mark.parametrize("found", ["bytes", "pipe", "settings"])
def test_a_matplotlibrc_of_the_current_folder_is_not_opened(tmp_path, found):
    if found == "pipe":
        os.mkfifo(tmp_path / "matplotlibrc")
    else:
        content = {"bytes": b"\xff\xd7", "settings": b"text.usetex: True\nsavefig.facecolor: black\n"}[found]
        (tmp_path / "matplotlibrc").write_bytes(content)
    drawing = "from dfm_nb.base import plots; plots.save(plots.blank(1, 1), 'a.png')"  # as every plot begins and ends
    subprocess.run([sys.executable, "-c", drawing], cwd=tmp_path, check=True, timeout=60)
    assert Image.open(tmp_path / "a.png").convert("L").getpixel((0, 0)) == 255
