"""docs/python.md: every block runs, in order, in an empty folder."""

import pytest

from tests.docs.docs_pages import Page, desk


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_block_of_the_page_runs(tmp_path):
    desk(tmp_path).run_page(Page("docs/python.md"))
    assert (tmp_path / "clips" / "1.mp4.json").is_file() and (tmp_path / "exported" / "model.safetensors").is_file()
