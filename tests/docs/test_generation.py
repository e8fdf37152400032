"""docs/generation.md: every bash and python block runs, in order, on a model of three
iterations; its tables name what the commands have.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest

from dfm_nb import evaluate, generate
from dfm_nb.base.video import read_image, read_video
from dfm_nb.diffusion.samplers import SAMPLERS, SCHEDULES
from dfm_nb.generation.request import Request
from tests.docs.docs_pages import Page, desk

PAGE = Page("docs/generation.md")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_block_of_the_page_runs(tmp_path, tiny_checkpoint, tiny_data):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "pretrain").symlink_to(tiny_checkpoint)
    (tmp_path / "data").symlink_to(tiny_data)
    here = desk(tmp_path)
    said = here.run_page(PAGE)

    clips = tmp_path / "clips"
    frames, fps = read_video(clips / "morpho.mp4")
    assert frames.shape == (9, 32, 48, 3) and fps == 12 and "bit for bit the clip of clips/morpho.mp4.json" in said
    listed = re.search(r"^clips/idx=.*$", PAGE.text, re.M)[0].split()
    assert sorted(listed) == sorted(
        str(p.relative_to(tmp_path)) for p in clips.glob("idx=*many.*") if p.suffix != ".json"
    )
    assert read_video(clips / "idx=2_rank=0_many.mp4")[1] == 8
    assert read_image(clips / "idx=3_rank=0_many.png").shape == (1, 64, 48, 3)
    assert said.count("wrote ") >= 16 and len(list(clips.glob("idx=*_rank=*_shared.mp4"))) == 2
    settings = {p.stem.partition(".")[0]: json.loads(p.read_text()) for p in clips.glob("*.json")}
    assert settings["negative"]["negative_prompt"] == "at night" and settings["interval"]["guidance_interval"] == [
        0.1,
        10,
    ]
    assert settings["levels"]["sigma_levels"][0] == 80 and settings["unipc"]["schedule"] == "focused"
    guide = settings["from-image"]["autoguidance_checkpoint"]
    assert guide["folder"] == "iter_0000002" and settings["from-image"]["init_image"].endswith("clips/unipc.png")
    assert settings["red"]["strength"] == 0.4 and settings["idx=0_rank=0_shared"]["layout"].startswith("CP")
    assert "(2, 5, 32, 48, 3) uint8" in said and said.count("6 6 (5, 32, 48, 3)") == 1
    measured = json.loads((tmp_path / "evaluation.json").read_text())["images"]
    assert measured["kernel_distance"]["value"] > measured["kernel_distance"]["real"]
    assert "kernel distance x 1000" in said
    for line in re.findall(r"^error: (.*)$", PAGE.text, re.M):  # as the page shows them
        for part in line.split(" ..."):
            assert part.strip(" .") in said, part
    assert said.count("error: ") == 4 and not list(clips.glob("wrong*"))


def test_the_page_names_every_flag_sampler_and_schedule(capsys):
    for module, unsaid in (
        (generate, {"--help", "--sigma-min", "--sigma-max", "--tokenizer-model"}),
        (evaluate, {"--help", "--checkpoint-path", "--dataset-path", "--size-px", "--max-frames"}),
    ):
        with pytest.raises(SystemExit):
            module.parse(["--help"])
        flags = set(re.findall(r"--[a-z][a-z-]+[a-z0-9]", capsys.readouterr().out)) - unsaid
        assert len(flags) > 15 and [f for f in sorted(flags) if f not in PAGE.text.replace("_", "-")] == []
    assert [n for n in (*SAMPLERS, *SCHEDULES) if f"`{n}`" not in PAGE.text and f" {n}`" not in PAGE.text] == []
    assert {f.name for f in fields(Request)} >= set(re.findall(r'"(\w+)":', _jsonl()))


def _jsonl() -> str:
    return re.search(r"<<'JSONL'\n(.*?)^JSONL", PAGE.text, re.M | re.S)[1]
