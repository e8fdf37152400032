"""Static plots: what a user names is text."""

import os
import subprocess
import sys

import matplotlib
import pytest
from PIL import Image

from dfm_nb.base import plots


def test_a_matplotlibrc_of_the_current_folder_changes_no_plot(tmp_path):
    found = {"figure.facecolor": "black", "savefig.dpi": 20, "savefig.bbox": "tight", "text.usetex": True}
    want = plots.curve_png([1, 2], [2.0, 1.0], "a")
    with matplotlib.rc_context(found):
        assert plots.curve_png([1, 2], [2.0, 1.0], "a") == want and matplotlib.rcParams["savefig.dpi"] == 20


def test_dollars_in_a_name_are_no_formula(tmp_path):
    plots.plot_loss([{"iteration": i, "loss": 1.0} for i in range(3)], tmp_path / "a.png", title=r"run $a_{$ b\x")
    assert Image.open(tmp_path / "a.png").width > 100


@pytest.mark.parametrize("found", ["bytes", "pipe"])
def test_a_matplotlibrc_of_the_current_folder_is_not_opened(tmp_path, found):
    if found == "pipe":
        os.mkfifo(tmp_path / "matplotlibrc")
    else:
        (tmp_path / "matplotlibrc").write_bytes(b"\xff\xd7")
    drawing = "from workbench import pictures; pictures.schedules().save('a.png')"
    subprocess.run([sys.executable, "-c", drawing], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "a.png").stat().st_size
