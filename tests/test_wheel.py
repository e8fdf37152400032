"""The wheel: everything is inside, and it works from a folder on the path, away from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from dfm_nb.base.video import read_video
from tests.docs.docs_pages import ROOT, Page

pytestmark = pytest.mark.slow  # builds and installs the wheel

NOTEBOOKS = sorted(p.name for p in (ROOT / "notebooks").glob("0*.ipynb"))


def pip(*arguments: str) -> None:
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what git has and has not ignored, so that leftovers in build/ cannot help."""
    place = tmp_path_factory.mktemp("wheel")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (place / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / "src" / name)
    pip("wheel", str(place / "src"), "--no-deps", "--no-build-isolation", "--no-index", "-w", str(place / "dist"))
    (built,) = (place / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def away(wheel, tmp_path_factory):
    """(folder to work in, environment) with the wheel unpacked on the path, and no sign of the checkout."""
    place = tmp_path_factory.mktemp("away")
    pip("install", "--no-deps", "--no-index", "--target", str(place / "site"), str(wheel))
    (place / "work").mkdir()
    env = dict(os.environ, PYTHONPATH=str(place / "site"), PYTHONSAFEPATH="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    return place / "work", env


def python(away, *words: str) -> str:
    folder, env = away
    how = {"cwd": folder, "env": env, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *words], **how)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_wheel_holds_all_that_is_not_code(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    data = {n.rpartition("share/dfm_nb/notebooks/")[2] for n in names if ".data/data/share/dfm_nb/notebooks/" in n}
    assert data == {*NOTEBOOKS, *(f"images/{p.name}" for p in (ROOT / "notebooks/images").iterdir())}
    suffixes = ".yaml .toml .json .safetensors .js .css .typed .md .py .png .csv".split()
    for folder in ("dfm_nb", "workbench"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in suffixes:
                assert str(path.relative_to(ROOT)) in names
    tops = {n.partition("/")[0] for n in names if not n.partition("/")[0].endswith((".dist-info", ".data"))}
    assert tops == {"dfm_nb", "workbench"}, "and nothing else"


def test_the_python_block_of_readme_runs_in_an_empty_folder(away, tmp_path):
    (code,) = (code for language, code in Page("README.md").blocks if language == "python")
    for large, small in (("num_images=200, num_clips=40", "num_images=40, num_clips=8"), ('iters": 20', 'iters": 3')):
        assert large in code
        code = code.replace(large, small)
    python((tmp_path, away[1]), "-c", code)
    frames, fps = read_video(tmp_path / "swallowtail.mp4")
    assert frames.shape == (9, 64, 64, 3) and fps in (8, 12), "as the training clips"
    assert (tmp_path / "swallowtail.mp4.json").is_file() and (tmp_path / "runs/small/config.yaml").is_file()


def test_commands_notebooks_plugins_and_weights_are_found_outside_the_checkout(away):
    code = """
from pathlib import Path
import torch
import dfm_nb, workbench
from dfm_nb import cli, config
from dfm_nb.base import plugins
from workbench import lab
print(lab.provide(Path("notebooks")), plugins.names("sources"), config.recipes(), dfm_nb.__file__, workbench.__file__)
print(tuple(plugins.load("tokenizers", "residual").build().encode(torch.zeros(1, 3, 1, 16, 16)).shape))
cli.main(["doctor"])
"""
    said = python(away, "-c", code)
    assert str(ROOT) not in said and said.count("/site/") == 2
    assert sorted(p.name for p in (away[0] / "notebooks").glob("*.ipynb")) == NOTEBOOKS
    assert "smithsonian_butterflies" in said and "demo" in said and "(1, 16, 1, 2, 2)" in said
    assert "everything that is needed is here" in said
