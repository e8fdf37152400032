"""docs/text.md: every bash and python block runs, in order, on tiny data."""

from __future__ import annotations

import json

import pytest

from dfm_nb.text import mixture
from dfm_nb.text.indexed import Index
from tests.docs.docs_pages import Page, desk
from tests.text.text_tokenizers import build, sample_text, save

PAGE = Page("docs/text.md")

# `hf download` without a network: it takes the same flags, and copies a tokenizer made here.
HF = """#!/usr/bin/env bash
set -euo pipefail
[ "$1" = download ] && [ "$2" = meta-llama/Llama-3.1-8B ] && shift 2
while [ $# -gt 0 ]; do
  case $1 in --include) shift 2;; --local-dir) folder=$2; shift 2;; *) echo "hf: $1?" >&2; exit 2;; esac
done
mkdir -p "$folder" && cp "$TINY_TOKENIZER"/* "$folder"
"""


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
    tiny = save(build("llama3"), folder / "tiny")
    here = desk(folder, hf=HF, TINY_TOKENIZER=str(tiny))
    said = here.run_page(PAGE)

    prefix = folder / "data" / "megatron"
    counts = {n: Index.open(prefix / f"{n}_text_document").num_documents for n in ("techpulse", "news", "flawed")}
    assert counts == {"techpulse": 30, "news": 30, "flawed": 30}
    assert "line has 'body'" in said and f"b'MMIDIDX\\x00\\x00' 1 8 {30} {30}" in said and "FAIL" not in said
    weights = [s.weight for s in mixture.read_yaml(folder / "data" / "blend.yaml").train]
    assert weights == pytest.approx([0.5, 0.3, 0.2])
    assert said.count("torch.Size([8, 32])") == 6
