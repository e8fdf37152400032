"""Every bash and python block of a page runs, in order, in an empty folder on tiny data."""

import re
import shutil

import nbformat
import pytest

from dfm_nb.base.metrics import read_metrics
from dfm_nb.base.video import read_video
from tests.docs.docs_pages import ROOT, Page, desk
from tests.json_files import write_lines
from tests.text.text_tokenizers import build, sample_text, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_python(tmp_path):
    desk(tmp_path).run_page(Page("docs/python.md"))
    assert (tmp_path / "clips/1.mp4.json").is_file() and (tmp_path / "exported/model.safetensors").is_file()


def test_training(tiny_data, tmp_path):
    (tmp_path / "butterflies").symlink_to(tiny_data)
    desk(tmp_path).run_page(Page("docs/training.md"))
    first, elsewhere, tuned = (
        [r["iteration"] for r in read_metrics(tmp_path / "runs" / name) if "loss" in r]
        for name in ("first", "elsewhere", "tuned")
    )
    assert first == list(range(1, 11)) and elsewhere == [5, 6, 7, 8] and len(tuned) == 2
    assert (tmp_path / "exported/model.safetensors").is_file()


def test_generation(tmp_path, tiny_checkpoint, tiny_data):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/pretrain").symlink_to(tiny_checkpoint)
    (tmp_path / "data").symlink_to(tiny_data)
    said = desk(tmp_path).run_page(Page("docs/generation.md"))
    clips = tmp_path / "clips"
    frames, fps = read_video(clips / "morpho.mp4")
    assert frames.shape == (9, 32, 48, 3) and fps == 12 and "bit for bit" in said
    assert read_video(clips / "idx=2_rank=0_many.mp4")[1] == 8
    assert len(list(clips.glob("idx=*_rank=*_shared.mp4"))) == 2


def test_parallelism_and_workbench(tmp_path):
    """Of notebook 05 the parameters alone: tests/notebooks runs it."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    path = tmp_path / "notebooks/05_parallelism.ipynb"
    notebook = nbformat.read(path, 4)
    notebook.cells = [
        c for c in notebook.cells if c.cell_type == "markdown" or "parameters" in c.metadata.get("tags", [])
    ]
    nbformat.write(notebook, path)
    here = desk(tmp_path)
    layouts = here.run_page(Page("docs/parallelism.md"))
    assert read_metrics(tmp_path / "runs/tp2")[-1]["iteration"] == 3
    assert re.findall(r"^(\d) \d\.\d+ \d\.\d+$", layouts, re.M) == ["1", "2", "3"]
    here.run_page(Page("docs/workbench.md"))
    assert (tmp_path / "runs/parallelism.html").stat().st_size > 10_000


def test_text(tmp_path):
    curated = tmp_path / "data/curated"
    curated.mkdir(parents=True)
    for number, name in enumerate(("techpulse_corpus", "news_articles", "tech_docs", "forums")):
        rows = [{"text": sample_text(1000 * number + i, words=40), "source": name} for i in range(30)]
        write_lines(curated / f"{name}.jsonl", rows)
    save(build("llama3"), tmp_path / "hub/meta-llama/Llama-3.1-8B")
    said = desk(tmp_path, hub=tmp_path / "hub").run_page(Page("docs/text.md"))
    assert "line has 'body'" in said and r"b'MMIDIDX\x00\x00' 1 8 30 30" in said and "FAIL" not in said
    assert said.count("torch.Size([8, 32])") == 6
