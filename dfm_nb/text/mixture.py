"""Blends of text corpora: which corpora, with what weights, in which splits, and how often each is seen.

A blend comes from `0.5 PREFIX 0.3 PREFIX ...` or from YAML rows of dataset_prefix, dataset_weight, dataset_split. The
weights of a split sum to 1, or the blend is refused (or normalised, when that is asked). Only index headers and lengths
are read; neither torch nor megatron is imported.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

import yaml

from dfm_nb.text.indexed import Index

SPLITS = ("train", "validation", "test")
_ALIASES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}
TOLERANCE = 1e-3


@dataclass(frozen=True)
class BlendCorpus:
    """One corpus of a split. `name` is how strategies call it: the file's name without `_text_document`."""

    prefix: str
    weight: float | None = None

    @property
    def name(self) -> str:
        return Path(self.prefix).name.removesuffix("_document").removesuffix("_text")


@dataclass(frozen=True)
class Blend:
    """Corpora by split; `split` cuts each training corpus as Megatron's --split does when the others are not given."""

    train: tuple[BlendCorpus, ...]
    validation: tuple[BlendCorpus, ...] = ()
    test: tuple[BlendCorpus, ...] = ()
    split: str | None = None
    warnings: tuple[str, ...] = ()

    def sources(self, split: str) -> tuple[BlendCorpus, ...]:
        return getattr(self, split)

    def prefixes(self) -> list[str]:
        """Every corpus once, in order."""
        return list(dict.fromkeys(s.prefix for split in SPLITS for s in self.sources(split)))


def parse_list(words: Sequence[str], split: str | None = "969,30,1", normalize: bool = False) -> Blend:
    """A blend from `WEIGHT PREFIX WEIGHT PREFIX ...`, or from prefixes alone (weights by a strategy, later).

    Raises
    ------
    ValueError : weights that are no numbers, or do not sum to 1; a corpus named twice
    """
    weights = [_number(word) for word in words]
    if not words:
        raise ValueError("a blend needs one corpus or more: 0.5 PREFIX 0.5 PREFIX; got nothing")
    if weights.count(None) == len(words):
        sources = [BlendCorpus(prefix) for prefix in words]
    elif len(words) % 2 or None in weights[::2]:
        raise ValueError(f"a blend alternates weights and prefixes: 0.5 PREFIX 0.5 PREFIX; got {' '.join(words)}")
    else:
        sources = [BlendCorpus(prefix, weight) for weight, prefix in zip(weights[::2], words[1::2])]
    return check(Blend(tuple(sources), split=split), normalize)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def read_yaml(path: str | Path, normalize: bool = False) -> Blend:
    """A blend from the rows of a YAML file, or from a mapping with `datasets` (the rows) and `split`."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML; {' '.join(str(error).split())}") from None
    top = data if isinstance(data, dict) else {"datasets": data}
    rows = top.get("datasets")
    if not set(top) <= {"datasets", "split"} or not isinstance(rows, list) or not rows:
        wanted = "must be rows of dataset_prefix, dataset_weight, dataset_split, alone or as `datasets` beside `split`"
        raise ValueError(f"{path} {wanted}; got {str(data)[:100]}")
    found: dict[str, list[BlendCorpus]] = {name: [] for name in SPLITS}
    for number, row in enumerate(rows, 1):
        split, source = _row(f"{path}, entry {number}", row)
        found[split].append(source)
    train, validation, test = (tuple(found[s]) for s in SPLITS)
    return check(Blend(train, validation, test, top.get("split")), normalize)


def _row(where: str, row: object) -> tuple[str, BlendCorpus]:
    known = ("dataset_prefix", "dataset_weight", "dataset_split")
    if not isinstance(row, dict) or not {known[0]} <= set(row) <= set(known):
        raise ValueError(f"{where} must have {known[0]}, and may have {known[1]} and {known[2]}; got {row!r}")
    split = _ALIASES.get(str(row.get("dataset_split", "train")))
    if split is None:
        raise ValueError(f"{where}: dataset_split must be one of {', '.join(SPLITS)}; got {row['dataset_split']!r}")
    weight = row.get("dataset_weight")
    if type(weight) not in (int, float, type(None)):  # true is an int, too
        raise ValueError(f"{where}: dataset_weight must be a number; got {weight!r}")
    return split, BlendCorpus(str(row["dataset_prefix"]), weight)


def write_yaml(blend: Blend, path: str | Path) -> None:
    """Write the blend in the form that `read_yaml` reads."""
    rows = [
        {"dataset_prefix": s.prefix, "dataset_weight": s.weight, "dataset_split": split}
        for split in SPLITS
        for s in blend.sources(split)
    ]
    data = {"datasets": rows, "split": blend.split} if blend.split else rows
    Path(path).write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def check(blend: Blend, normalize: bool = False) -> Blend:
    """The blend if it is sound; normalised weights when asked; warnings for what is lawful but seldom meant."""
    if not blend.train:
        raise ValueError("a blend needs a corpus with dataset_split train; got none")
    train, validation, test = (_sound(blend.sources(split), split, normalize) for split in SPLITS)
    trained = {s.prefix for s in train}
    twice = dict.fromkeys(s.prefix for s in (*validation, *test) if s.prefix in trained)
    warnings = tuple(f"{p} is both trained on and evaluated on: its loss will be too good" for p in twice)
    return Blend(train, validation, test, blend.split, warnings)


def _sound(sources: tuple[BlendCorpus, ...], split: str, normalize: bool) -> tuple[BlendCorpus, ...]:
    for prefix, times in Counter(s.prefix for s in sources).items():
        if times > 1:
            raise ValueError(f"a corpus may stand once in a split; {prefix} stands {times} times in {split}")
    weights = [s.weight for s in sources if s.weight is not None]
    if not weights:
        return sources
    if len(weights) < len(sources):
        missing = next(s.prefix for s in sources if s.weight is None)
        raise ValueError(f"all corpora of {split} need a weight, or none; {missing} has none")
    if not all(math.isfinite(w) and w >= 0 for w in weights) or sum(weights) <= 0:
        listed = ", ".join(f"{w:g}" for w in weights)
        raise ValueError(f"the weights of {split} must be 0 or more and not all 0; got {listed}")
    total = math.fsum(weights)
    if abs(total - 1) > TOLERANCE and not normalize:
        listed = " + ".join(f"{w:g}" for w in weights)
        raise ValueError(f"the weights of {split} must sum to 1, not {listed} = {total:g}; or give --normalize")
    return _weighted(sources, weights)


def _weighted(sources: tuple[BlendCorpus, ...], raw: Sequence[float]) -> tuple[BlendCorpus, ...]:
    """The sources with weights in proportion to `raw`."""
    total = math.fsum(raw)
    return tuple(BlendCorpus(s.prefix, w / total) for s, w in zip(sources, raw))


def token_counts(blend: Blend) -> dict[str, int]:
    """Tokens of each corpus, by prefix. Raises FileNotFoundError for one that is missing."""
    return {p: Index.open(p).num_tokens for p in blend.prefixes()}


STRATEGIES = ("proportional", "equal", "upweight:NAME=0.6", "token-balanced")


def apply_strategy(blend: Blend, strategy: str, counts: dict[str, int]) -> Blend:
    """The blend with the weights of its training corpora (and of the others, where they have none) set.

    `proportional`: by tokens, so every corpus is seen equally often. `equal`: the same share each. `upweight:NAME=0.6`:
    that share for NAME, the rest in proportion to tokens. `token-balanced`: inverse to tokens.
    """
    kind, _, argument = strategy.partition(":")
    tokens = [counts[s.prefix] for s in blend.train]
    if 0 in tokens:
        raise ValueError(f"a corpus of a blend must hold tokens; {blend.train[tokens.index(0)].prefix} is empty")
    equal, inverse = [1.0] * len(tokens), [1 / t for t in tokens]
    by_name: dict[str, Sequence[float]] = {"proportional": tokens, "equal": equal, "token-balanced": inverse}
    raw = _upweight(blend.train, tokens, argument) if kind == "upweight" else by_name.get(strategy)
    if raw is None:
        raise ValueError(f"--strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}")
    train = _weighted(blend.train, raw)
    validation, test = (
        rows if not rows or rows[0].weight is not None else _weighted(rows, [counts[s.prefix] for s in rows])
        for rows in (blend.validation, blend.test)
    )
    return check(Blend(train, validation, test, blend.split))


def _upweight(sources: Sequence[BlendCorpus], tokens: list[int], argument: str) -> list[float]:
    name, _, value = argument.partition("=")
    share = _number(value) or 0.0
    places = [i for i, s in enumerate(sources) if name in (s.name, s.prefix, Path(s.prefix).name)]
    rest = sum(t for i, t in enumerate(tokens) if i not in places)
    if len(places) != 1 or not 0 < share < 1 or not rest:
        names = ", ".join(s.name for s in sources)
        raise ValueError(
            f"--strategy upweight:NAME=0.6 needs a share between 0 and 1, NAME one of {names}, and a corpus left; "
            f"got {argument!r}"
        )
    return [share if i in places else (1 - share) * t / rest for i, t in enumerate(tokens)]


@dataclass(frozen=True)
class Exposure:
    """How often a training corpus is seen: `epochs` = weight * budget / tokens."""

    name: str
    prefix: str
    weight: float
    tokens: int
    epochs: float


def exposures(blend: Blend, counts: dict[str, int], token_budget: float) -> list[Exposure]:
    """Effective epochs of each training corpus for a budget of training tokens."""
    if not token_budget > 0:
        raise ValueError(f"--token-budget must be over 0; got {token_budget:g}")
    rows = []
    for source in blend.train:
        weight, tokens = source.weight or 0.0, counts[source.prefix]
        rows.append(Exposure(source.name, source.prefix, weight, tokens, weight * token_budget / max(1, tokens)))
    return rows
