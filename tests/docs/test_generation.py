"""docs/generation.md: every bash and python block runs, in order, on a model of three iterations."""

import pytest

from dfm_nb.base.video import read_video
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
    assert frames.shape == (9, 32, 48, 3) and fps == 12 and "bit for bit" in said
    assert read_video(clips / "idx=2_rank=0_many.mp4")[1] == 8
    assert len(list(clips.glob("idx=*_rank=*_shared.mp4"))) == 2
