"""docs/text.md: every bash and python block runs, in order, on tiny data."""

import json

import pytest

from tests.docs.docs_pages import Page, desk
from tests.text.text_tokenizers import build, sample_text, save

PAGE = Page("docs/text.md")


def make_inputs(folder):
    """data/curated/*.jsonl of the page."""
    corpora = {"techpulse_corpus": 0, "news_articles": 1000, "tech_docs": 2000, "forums": 3000}
    (folder / "data" / "curated").mkdir(parents=True)
    for name, seed in corpora.items():
        rows = [{"text": sample_text(seed + i, words=40), "source": name} for i in range(30)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / "curated" / f"{name}.jsonl").write_text(text)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_block_of_the_page_runs(tmp_path):
    folder = tmp_path
    make_inputs(folder)
    save(build("llama3"), folder / "hub" / "meta-llama" / "Llama-3.1-8B")
    here = desk(folder, hub=folder / "hub")
    said = here.run_page(PAGE)

    assert "line has 'body'" in said and f"b'MMIDIDX\\x00\\x00' 1 8 {30} {30}" in said and "FAIL" not in said
    assert said.count("torch.Size([8, 32])") == 6
