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
    """What the file holds, by form."""
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def prompt(form: str, part: str, attributes: Mapping[str, str], i: int) -> str:
    """The i-th prompt of a form that asks for a still with these attributes.

    Parameters
    ----------
    part : `development` or `test`; they share no sentence and no synonym.
    attributes : all that `synthetic.caption_for` names.
    """
    sentences = forms()[form][part]
    wings, pattern = synthetic.WINGS_WORDS[attributes["pattern"]]
    other = {
        name: values[(values.index(attributes[name]) + 1 + i % (len(values) - 1)) % len(values)]
        for name, values in (("colour", synthetic.COLOURS), ("pattern", synthetic.PATTERNS))
    }
    other_wings, other_pattern = synthetic.WINGS_WORDS[other["pattern"]]
    words = forms()[form].get("words", {})
    chosen = synthetic.PARTS.index(part) * 2 + i % 2
    synonyms = {
        f"{name}_synonym": words[attributes[value]][chosen]
        for name, value in (("colour", "colour"), ("pattern", "pattern"), ("place", "background"))
        if attributes[value] in words
    }
    text = sentences[i % len(sentences)].format(
        colour=attributes["colour"],
        species=attributes["species"],
        pattern=pattern,
        wings=wings,
        place=synthetic.PLACE_WORDS[attributes["background"]],
        posture=synthetic.POSTURE_WORDS["still"][attributes["posture"]],
        other_colour=other["colour"],
        other_pattern=other_pattern,
        other_wings=other_wings,
        **synonyms,
    )
    return synthetic.with_articles(text[0].upper() + text[1:])
