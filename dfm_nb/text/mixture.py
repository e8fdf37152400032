"""Blends of text corpora: which corpora, with what weights, in which splits, and how often each is seen.

A blend comes from `0.5 PREFIX 0.3 PREFIX ...` or from YAML rows of dataset_prefix, dataset_weight, dataset_split. The
weights of a split must sum to 1, unless normalising is requested. Only index headers and lengths are read; neither
torch nor megatron is imported.
"""

import math
import os
from pathlib import Path
from typing import Literal, Sequence

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from dfm_nb.base.files import MARK, write_atomically
from dfm_nb.config import notation
from dfm_nb.text.check import sound

SPLITS = ("train", "validation", "test")
TOLERANCE = 1e-3  # of the sum of rounded weights, such as 0.333 three times


class BlendCorpus(BaseModel, extra="forbid"):
    """One corpus of a split, a row of a blend's YAML."""

    dataset_prefix: str
    dataset_weight: float | None
    dataset_split: Literal["train", "validation", "test"] = "train"

    @property
    def name(self) -> str:
        """What strategies call it: the file's name without `_text_document`."""
        return Path(self.dataset_prefix).name.removesuffix("_document").removesuffix("_text")


class Blend(list[BlendCorpus]):
    """Corpora by split. The weights of a split sum to 1; training may have none yet (a strategy sets them)."""

    def corpora(self, split: str) -> list[BlendCorpus]:
        return [corpus for corpus in self if corpus.dataset_split == split]

    @property
    def train(self) -> list[BlendCorpus]:
        return self.corpora("train")

    def prefixes(self) -> list[str]:
        """Every corpus once, in order."""
        return list(dict.fromkeys(corpus.dataset_prefix for corpus in self))

    @property
    def warnings(self) -> list[str]:
        """Warnings about what is allowed but rarely intended."""
        trained = {corpus.dataset_prefix for corpus in self.train}
        both = dict.fromkeys(c.dataset_prefix for c in self[len(self.train) :] if c.dataset_prefix in trained)
        return [f"{prefix} is both trained on and evaluated on: its loss will be too good" for prefix in both]


def parse_list(words: Sequence[str], normalize: bool = False) -> Blend:
    """A blend from `WEIGHT PREFIX WEIGHT PREFIX ...`, or from prefixes alone (a strategy sets the weights later).

    Raises
    ------
    ValueError : weights that are not numbers or do not sum to 1; a duplicate corpus
    """
    weights = [_number(word) for word in words]
    if weights.count(None) == len(words):
        weights = [None] * len(words)
    elif len(words) % 2 or None in weights[::2]:
        raise ValueError(f"a blend alternates weights and prefixes: 0.5 PREFIX 0.5 PREFIX; got {' '.join(words)}")
    else:
        words = words[1::2]
        weights = weights[::2]
    corpora = [BlendCorpus(dataset_prefix=prefix, dataset_weight=weight) for prefix, weight in zip(words, weights)]
    return _sound_blend(corpora, normalize)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def read_yaml(path: str | Path, normalize: bool = False) -> Blend:
    """A blend from the rows of a YAML file."""
    try:
        words = notation.read(Path(path).read_text(encoding="utf-8"), words=True)
        rows = TypeAdapter(list[BlendCorpus]).validate_python(words)
    except ValidationError as error:
        fault = error.errors()[0]  # located by the row, from 0, and the key
        where = ".".join(map(str, fault["loc"])) or "the rows"
        raise ValueError(f"{path}: {where}: {fault['msg']}; got {fault['input']!r}; see docs/text.md") from None
    except ValueError as error:
        raise ValueError(f"{path} must be YAML; {error}") from None
    return _sound_blend(rows, normalize)


def write_yaml(blend: Blend, path: str | Path) -> None:
    """Write the blend in the form that `read_yaml` reads."""
    rows = [corpus.model_dump() for corpus in blend]
    write_atomically(path, f"# {MARK}\n{yaml.safe_dump(rows, sort_keys=False)}".encode())


def _sound_blend(corpora: list[BlendCorpus], normalize: bool) -> Blend:
    """The blend of these corpora, by split, with the weights of each split divided by their sum."""
    given = Blend(corpora)
    if not given.train:
        raise ValueError("a blend needs a corpus with dataset_split train: 0.5 PREFIX 0.5 PREFIX; got none")
    sound = Blend()
    for split in SPLITS:
        sound += _sound(split, given.corpora(split), normalize)
    return sound


def _sound(split: str, corpora: list[BlendCorpus], normalize: bool) -> list[BlendCorpus]:
    files = [os.path.realpath(f"{corpus.dataset_prefix}.idx") for corpus in corpora]
    for corpus, file in zip(corpora, files):
        if files.count(file) > 1:
            times = f"{corpus.dataset_prefix} appears {files.count(file)} times in {split}"
            raise ValueError(f"a corpus may appear once in a split; {times}")
    weights = [corpus.dataset_weight for corpus in corpora if corpus.dataset_weight is not None]
    if not weights:
        return corpora
    total = math.fsum(weights)
    must = ""
    if not all(0 <= weight < math.inf for weight in weights) or total <= 0:
        must = "be 0 or more, and not all 0"
    elif abs(total - 1) > TOLERANCE and not normalize:
        must = "sum to 1, or use --normalize"
    if must:
        listed = " + ".join(f"{weight:g}" for weight in weights)
        raise ValueError(f"the weights of {split} must {must}; got {listed} = {total:g}")
    return _weighted(corpora, weights)


def _weighted(corpora: list[BlendCorpus], raw: Sequence[float]) -> list[BlendCorpus]:
    """The corpora with weights in proportion to `raw`."""
    total = math.fsum(raw)
    return [corpus.model_copy(update={"dataset_weight": w / total}) for corpus, w in zip(corpora, raw)]


def token_counts(blend: Blend) -> dict[str, int]:
    """Number of tokens by prefix. Raises FileNotFoundError for a missing corpus, ValueError for a damaged one."""
    return {p: sound(p).num_tokens for p in blend.prefixes()}


def apply_strategy(blend: Blend, strategy: str, counts: dict[str, int]) -> Blend:
    """The blend with the weights of its training corpora set.

    `proportional`: by tokens, so every corpus is seen equally often. `equal`: the same share each. `upweight:NAME=0.6`:
    this share for NAME, the rest in proportion to tokens. `token-balanced`: inversely proportional to tokens.

    Corpora A, B of 300 and 100 tokens: 0.75, 0.25; 0.5, 0.5; upweight:B=0.6 gives 0.4, 0.6; 0.25, 0.75.
    """
    kind, _, argument = strategy.partition(":")
    tokens = [counts[c.dataset_prefix] for c in blend.train]
    if 0 in tokens:
        raise ValueError(f"a corpus of a blend must have tokens; {blend[tokens.index(0)].dataset_prefix} is empty")
    shares: dict[str, Sequence[float]] = {
        "proportional": tokens,
        "equal": [1.0] * len(tokens),
        "token-balanced": [1 / t for t in tokens],
    }
    if kind == "upweight":
        shares[strategy] = _upweight(blend.train, tokens, argument)
    if strategy not in shares:
        named = ", ".join(shares)
        raise ValueError(f"--strategy must be {named} or upweight:NAME=0.6; got {strategy!r}")
    return Blend(_weighted(blend.train, shares[strategy]) + blend[len(tokens) :])


def _upweight(corpora: list[BlendCorpus], tokens: list[int], argument: str) -> list[float]:
    name, _, value = argument.partition("=")
    share = _number(value) or 0.0
    chosen = [i for i, corpus in enumerate(corpora) if name in (corpus.name, corpus.dataset_prefix)]
    rest = sum(tokens) - sum(tokens[i] for i in chosen)
    if len(chosen) != 1 or not 0 < share < 1 or not rest:
        names = ", ".join(corpus.name for corpus in corpora)
        raise ValueError(f"--strategy upweight needs one NAME of {names} and a share below 1; got {argument!r}")
    shares = [(1 - share) * count / rest for count in tokens]
    shares[chosen[0]] = share
    return shares


def exposures(blend: Blend, counts: dict[str, int], token_budget: float) -> list[dict]:
    """How often each training corpus is seen in a budget of training tokens.

    Rows of name, prefix, weight, tokens and epochs = weight * budget / tokens, ready for JSON and for pandas.
    """
    rows = []
    for corpus in blend.train:
        assert corpus.dataset_weight is not None
        tokens = counts[corpus.dataset_prefix]
        epochs = corpus.dataset_weight * token_budget / max(1, tokens)
        row = {
            "name": corpus.name,
            "prefix": corpus.dataset_prefix,
            "weight": corpus.dataset_weight,
            "tokens": tokens,
            "epochs": epochs,
        }
        rows.append(row)
    return rows
