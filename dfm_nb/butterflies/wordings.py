"""Prompts in words that training did not use, from `wordings.toml`: other orders, conversation, synonyms, negation."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dfm_nb.butterflies import synthetic

FILE = Path(__file__).with_suffix(".toml")


@functools.cache
def forms() -> dict[str, dict[str, Any]]:
    """The file's content, by form."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def prompt(form: str, part: str, attributes: Mapping[str, str], i: int) -> str:
    """The i-th prompt of a form, for a still with these attributes.

    Parameters
    ----------
    part : `development` or `test`; they share no sentence and no synonym.
    attributes : all attributes of `synthetic.caption_for`.
    """
    form_words, sentences = forms()[form].get("words", {}), forms()[form][part]
    chosen = synthetic.PARTS.index(part) * 2 + i % 2  # of four synonyms, each part has two
    synonyms = {
        f"{name}_synonym": form_words[attributes[value]][chosen]
        for name, value in (("colour", "colour"), ("pattern", "pattern"), ("place", "background"))
        if attributes[value] in form_words
    }
    other = {
        name: values[(values.index(attributes[name]) + 1 + i % (len(values) - 1)) % len(values)]
        for name, values in (("colour", synthetic.COLOURS), ("pattern", synthetic.PATTERNS))
    }
    others = {f"other_{name}": word for name, word in synthetic.words_of({**attributes, **other}).items()}
    words = synthetic.words_of({**attributes, "motion": "still"})
    text = sentences[i % len(sentences)].format(**words, **others, **synonyms)
    return synthetic.with_articles(text[0].upper() + text[1:])
