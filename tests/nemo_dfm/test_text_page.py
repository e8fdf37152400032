"""The page "Data Preparation for Megatron-LM": its commands and snippets, with other paths, through `dfm text`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml

from dfm_nb import parallel
from dfm_nb.text.blend import BlendConfig, build_datasets
from dfm_nb.text.weights import read_yaml
from tests.processes import commands
from tests.text.text_tokenizers import build, sample_text, save

DOMAINS = {"techpulse_corpus": 60, "news_articles": 50, "tech_docs": 40, "forums": 30}
OUTPUTS = {"techpulse_corpus": "techpulse", "news_articles": "news", "tech_docs": "techdocs", "forums": "forums"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """/shared of the page: curated JSONL with the page's keys, and a tokenizer of Llama 3's kind."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "data" / "curated").mkdir(parents=True)
    for number, (name, count) in enumerate(DOMAINS.items()):
        rows = [
            {"text": sample_text(1000 * number + i), "title": f"{name} {i}", "source": name, "quality_score": 0.9}
            for i in range(count)
        ]
        (folder / f"data/curated/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save(build("llama3"), folder / "tokenizer" / "llama-3.1-8b")
    return folder


def preprocess(shared: Path, name: str, *more: str) -> Path:
    output = shared / "data" / "megatron" / OUTPUTS[name]
    done = commands().run(
        *("dfm", "text", "preprocess", "--input", shared / f"data/curated/{name}.jsonl", "--output-prefix", output),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", shared / "tokenizer/llama-3.1-8b"),
        *("--json-keys", "text", "--workers", "16", *more, "--append-eod"),
    )
    assert done.returncode == 0, done.stderr
    return output.with_name(f"{output.name}_text_document")


@pytest.fixture(scope="module")
def corpora(shared) -> dict[str, Path]:
    """Steps 3 and 5: one corpus, then the three domains."""
    chunks = {"techpulse_corpus": ("--chunk-size", "1000")}
    return {OUTPUTS[name]: preprocess(shared, name, *chunks.get(name, ())) for name in DOMAINS}


@pytest.mark.slow
def test_preprocessing_writes_both_files_with_the_header_that_the_page_reads(shared, corpora):
    prefix = corpora["techpulse"]
    assert prefix == shared / "data/megatron/techpulse_text_document"
    assert all(os.path.getsize(f"{prefix}{end}") > 0 for end in (".bin", ".idx"))
    with open(f"{prefix}.idx", "rb") as f:  # the page's snippet
        magic = f.read(9)
        version = np.frombuffer(f.read(8), dtype=np.int64)[0]
        dtype_code = np.frombuffer(f.read(1), dtype=np.uint8)[0]
        num_sequences = np.frombuffer(f.read(8), dtype=np.int64)[0]
        num_documents = np.frombuffer(f.read(8), dtype=np.int64)[0]
    assert magic == b"MMIDIDX\x00\x00" and version == 1
    # The page expects code 5 and documents = sequences. The format's codes are 8 for uint16 and 4 for int32, and it
    # counts the ends of documents, one more than documents.
    assert dtype_code == 8 and num_sequences == DOMAINS["techpulse_corpus"] and num_documents == num_sequences + 1


@pytest.mark.slow
def test_the_blend_of_the_page_by_words_and_by_yaml(shared, corpora, tmp_path):
    weights = {"news": 0.5, "techdocs": 0.3, "forums": 0.2}
    words = [word for name, weight in weights.items() for word in (weight, corpora[name])]
    by_words = commands().run("dfm", "text", "blend", "--data-path", *words, "--max-epochs", 99, "--json")
    rows = [
        {"dataset_prefix": str(corpora[name]), "dataset_weight": weight, "dataset_split": "train"}
        for name, weight in weights.items()
    ]
    rows += [{"dataset_prefix": str(corpora["news"]), "dataset_weight": 1.0, "dataset_split": "validation"}]
    config = tmp_path / "blend_config.yaml"
    config.write_text(yaml.safe_dump(rows))
    by_yaml = commands().run("dfm", "text", "blend", "--config", config, "--max-epochs", 99, "--json")
    assert by_words.returncode == by_yaml.returncode == 0, by_words.stderr + by_yaml.stderr
    train = json.loads(by_words.stdout)["train"]
    assert train == json.loads(by_yaml.stdout)["train"] and [r["weight"] for r in train] == [0.5, 0.3, 0.2]

    length = 256  # the page's 4,096 on corpora that are smaller by as much
    parallel.init()
    try:
        data = build_datasets(read_yaml(config), BlendConfig(length, (100, 8, 0), cache_dir=str(tmp_path / "cache")))
        chosen = np.bincount([int(data["train"][i]["dataset_id"]) for i in range(100)])
        sample = data["train"][0]["tokens"]
    finally:
        parallel.shutdown()
    assert chosen.tolist() == [50, 30, 20]
    eod = json.loads(Path(f"{corpora['news']}.meta.json").read_text())["eod_id"]
    assert sample.shape == (length,) and (sample == eod).any()  # short documents share a sample


@pytest.mark.slow
def test_the_checklist_passes_and_finds_another_tokenizer(shared, corpora):
    """Files not empty, as many documents as lines, one tokenizer over the blend."""
    source = shared / "data/curated/techpulse_corpus.jsonl"
    done = commands().run("dfm", "text", "verify", corpora["techpulse"], "--append-eod", "--input", source)
    assert done.returncode == 0, done.stdout
    other = save(build("qwen", 500), shared / "tokenizer" / "other")
    output = shared / "data" / "megatron" / "other"
    words = ("--input", source, "--output-prefix", output, "--tokenizer-model", other, "--append-eod")
    assert commands().run("dfm", "text", "preprocess", *words).returncode == 0
    done = commands().run("dfm", "text", "verify", corpora["news"], f"{output}_text_document")
    assert done.returncode == 1 and "FAIL" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "flags", "said"),
    [
        ('{"text": "a"}', ["--tokenizer-model", "gone/tokenizer"], "hf download gone/tokenizer"),
        ('{"body": "a"}', [], "the line has 'body' (--json-keys"),
        ("", [], "must hold at least one document"),
    ],
    ids=["tokenizer not found", "KeyError text", "empty input"],
)
def test_the_common_issues_end_in_a_sentence_with_the_fix(shared, tmp_path, lines, flags, said):
    (tmp_path / "input.jsonl").write_text(lines)
    words = ["--input", tmp_path / "input.jsonl", "--output-prefix", tmp_path / "out"]
    flags = flags or ["--tokenizer-model", shared / "tokenizer/llama-3.1-8b"]
    done = commands().run("dfm", "text", "preprocess", *words, *flags)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
