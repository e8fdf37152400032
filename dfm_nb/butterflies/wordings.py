"""Prompts in words that training did not use, from `wordings.toml`: other orders, conversation, synonyms, negation."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dfm_nb.butterflies import synthetic

FORMS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The file's content."""


def prompt(form: str, part: str, attributes: Mapping[str, str], i: int) -> str:
    """The i-th prompt of a form, for a still with these attributes.

    Parameters
    ----------
    part : `development` or `test`; they share no sentence and no synonym.
    attributes : all attributes of `synthetic.caption_for`.
    """
    form_words = FORMS[form].get("words", {})
    sentences = FORMS[form][part]
    chosen = synthetic.PARTS.index(part) * 2 + i % 2  # of four synonyms, each part has two
    words = synthetic.words_of({**attributes, "motion": "still"})
    for name in ("colour", "pattern", "background"):
        synonyms = form_words.get(attributes[name])
        if synonyms:
            words[f"{name}_synonym"] = synonyms[chosen]
    other = dict(attributes)
    for name, values in (("colour", synthetic.COLOURS), ("pattern", synthetic.PATTERNS)):
        other[name] = values[(values.index(attributes[name]) + 1 + i % (len(values) - 1)) % len(values)]
    for name, word in synthetic.words_of(other).items():
        words[f"other_{name}"] = word
    text = sentences[i % len(sentences)].format(**words)
    return synthetic.with_articles(text[0].upper() + text[1:])
