"""Tokenizers as folders, saved once."""

from pathlib import Path

import pytest

from tests.text.text_tokenizers import build, save

KINDS = ("bpe", "gpt2", "wordpiece")


@pytest.fixture(scope="session")
def folders(make_once) -> dict[str, Path]:
    def make(root: Path) -> None:
        for kind in KINDS:
            save(build(kind), root / kind)
        save(build("gpt2"), root / "no_eos", eos=False)

    return {path.name: path for path in make_once("text-tokenizers", make).iterdir()}
