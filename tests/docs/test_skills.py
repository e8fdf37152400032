"""The commands of the skills run in order, at small sizes."""

import csv
import json

import numpy as np
import pytest

from dfm_nb.base.video import write_png
from tests.docs.docs_pages import Page, desk
from tests.json_files import read_json

PAGES = [Page(f"skills/{name}/SKILL.md") for name in ("prepare-data", "train-and-watch", "judge-and-hand-on")]


@pytest.mark.slow
def test_the_commands_of_the_skills_run_in_order(tmp_path):
    place = tmp_path / "my-pictures"
    place.mkdir()
    for i, colour in enumerate(np.random.default_rng(0).integers(0, 256, (64, 3), np.uint8)):
        write_png(place / f"{i}.png", np.tile(colour, (40, 48, 1)))
    with (place / "metadata.csv").open("w") as file:
        rows = [("file_name", "text"), *((f"{i}.png", f"a colour, number {i}") for i in range(64))]
        csv.writer(file).writerows(rows)
    here = desk(tmp_path, SHORT_SIDE="32", MINUTES="0.02", PROMPTS="8")
    prepared, inspected = (json.loads(here.run(*block)) for block in PAGES[0].blocks)
    assert prepared["counts"]["samples"] == 64 and inspected["faults"] == []
    for page in PAGES[1:]:
        for language, code in page.blocks:
            here.run(language, code.replace("--run-dir runs/mine", "--run-dir runs/mine --model tiny"))
    assert read_json(tmp_path / "train.json")
    assert (tmp_path / "mine.png").is_file() and (tmp_path / "mine.safetensors").is_file()
