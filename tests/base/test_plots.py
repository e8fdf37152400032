"""Static plots: what a user names is text."""

from PIL import Image

from dfm_nb.base import plots


def test_dollars_in_a_name_are_no_formula(tmp_path):
    plots.plot_loss([{"iteration": i, "loss": 1.0} for i in range(3)], tmp_path / "a.png", title=r"run $a_{$ b\x")
    assert Image.open(tmp_path / "a.png").width > 100
