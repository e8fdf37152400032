"""Blends of text corpora: which corpora, with what weights, over which splits and when.

Enters: `0.5 PREFIX 0.3 PREFIX ...`, or YAML rows of dataset_prefix, dataset_weight, dataset_split. Leaves: a checked
`Blend`, its weights by a strategy, and how often each corpus is seen for a budget of tokens.
Guarantees: the weights of a split sum to 1 or the blend is refused (or normalised, when that is asked).
Cost: reads the index headers and lengths; imports neither torch nor megatron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Sequence

from dfm_nb.text.index import Index

SPLITS = ("train", "validation", "test")
_ALIASES = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Source:
    """One corpus of a split. `name` is how strategies call it: the file's name without `_text_document`."""

    prefix: str
    weight: float | None = None
    quality: float | None = None

    @property
    def name(self) -> str:
        return Path(self.prefix).name.removesuffix("_document").removesuffix("_text")


@dataclass(frozen=True)
class Phase:
    """From `start` (0 to 1 of training) on, the training corpora have these weights."""

    start: float
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Blend:
    """Corpora by split; `split` cuts each training corpus as Megatron's --split does when the others are not given."""

    train: tuple[Source, ...]
    validation: tuple[Source, ...] = ()
    test: tuple[Source, ...] = ()
    split: str | None = None
    phases: tuple[Phase, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def sources(self, split: str) -> tuple[Source, ...]:
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
    words = list(words)
    if not words:
        raise ValueError("a blend needs one corpus or more: 0.5 PREFIX 0.5 PREFIX; got nothing")
    if not any(map(_is_number, words)):
        sources = [Source(p) for p in words]
    else:
        if len(words) % 2 or not all(map(_is_number, words[::2])):
            raise ValueError(f"a blend alternates weights and prefixes: 0.5 PREFIX 0.5 PREFIX; got {' '.join(words)}")
        sources = [Source(p, float(w)) for w, p in zip(words[::2], words[1::2])]
    return check(Blend(tuple(sources), split=split), normalize)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_yaml(path: str | Path, normalize: bool = False) -> Blend:
    """A blend from the rows of a YAML file; `quality` is an optional fourth key, read by the strategy of that name.

    The file may instead be a mapping with `datasets` (the rows), `split`, and `curriculum`: rows of `start` (0 to 1 of
    training) and `weights` (by corpus name).
    """
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML; {' '.join(str(error).split())}") from None
    top = data if isinstance(data, dict) else {"datasets": data}
    unknown = set(top) - {"datasets", "split", "curriculum"}
    if unknown or not isinstance(top.get("datasets"), list) or not top["datasets"]:
        extra = f"; unknown: {', '.join(map(str, sorted(unknown)))}" if unknown else ""
        raise ValueError(f"{path} must be a list of dataset_prefix, dataset_weight, dataset_split{extra}")
    found: dict[str, list[Source]] = {name: [] for name in SPLITS}
    for number, row in enumerate(top["datasets"], 1):
        split, source = _row(path, number, row)
        found[split].append(source)
    blend = Blend(*(tuple(found[s]) for s in SPLITS), split=top.get("split"))
    blend = replace(blend, phases=tuple(_phase(path, row, blend.train) for row in top.get("curriculum") or ()))
    return check(blend, normalize)


def _row(path: str | Path, number: int, row: object) -> tuple[str, Source]:
    where = f"{path}, entry {number}"
    if not isinstance(row, dict) or "dataset_prefix" not in row:
        raise ValueError(f"{where} must have dataset_prefix; got {row!r}")
    unknown = set(row) - {"dataset_prefix", "dataset_weight", "dataset_split", "quality"}
    if unknown:
        known = "dataset_prefix, dataset_weight, dataset_split and quality"
        raise ValueError(f"{where} may have {known}; got {', '.join(map(str, sorted(unknown)))}")
    split = _ALIASES.get(str(row.get("dataset_split", "train")))
    if split is None:
        raise ValueError(f"{where}: dataset_split must be one of {', '.join(SPLITS)}; got {row['dataset_split']!r}")
    numbers = {}
    for key in ("dataset_weight", "quality"):
        value = row.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"{where}: {key} must be a number; got {value!r}")
        numbers[key] = None if value is None else float(value)
    return split, Source(str(row["dataset_prefix"]), numbers["dataset_weight"], numbers["quality"])


def _phase(path: str | Path, row: object, sources: tuple[Source, ...]) -> Phase:
    if not isinstance(row, dict) or set(row) != {"start", "weights"} or not isinstance(row["weights"], dict):
        raise ValueError(f"{path}: a row of curriculum must have start and weights (by corpus name); got {row!r}")
    names = [s.name for s in sources]
    if set(row["weights"]) != set(names):
        raise ValueError(f"{path}: a phase must weigh {', '.join(names)}; got {', '.join(map(str, row['weights']))}")
    return Phase(float(row["start"]), tuple(float(row["weights"][n]) for n in names))


def check(blend: Blend, normalize: bool = False) -> Blend:
    """The blend if it is sound; normalised weights when asked; warnings for what is lawful but seldom meant."""
    if not blend.train:
        raise ValueError("a blend needs a corpus with dataset_split train; got none")
    for split in SPLITS:
        sources = blend.sources(split)
        names = [s.prefix for s in sources]
        for prefix in {n for n in names if names.count(n) > 1}:
            raise ValueError(
                f"a corpus may stand once in a split; {prefix} stands {names.count(prefix)} times in {split}"
            )
        given = [s for s in sources if s.weight is not None]
        if given and len(given) < len(sources):
            missing = next(s for s in sources if s.weight is None)
            raise ValueError(f"all corpora of {split} need a weight, or none; {missing.prefix} has none")
        if given:
            weights = _checked([s.weight for s in given], f"the weights of {split}", normalize)
            blend = replace(blend, **{split: tuple(replace(s, weight=w) for s, w in zip(sources, weights))})
    phases = [replace(p, weights=_checked(p.weights, f"the phase at {p.start:g}", normalize)) for p in blend.phases]
    starts = [p.start for p in phases]
    if phases and (starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= 1):
        raise ValueError(f"the starts of a curriculum must rise from 0 and stay below 1; got {starts}")
    train = {s.prefix for s in blend.train}
    twice = [s.prefix for split in SPLITS[1:] for s in blend.sources(split) if s.prefix in train]
    warnings = tuple(
        f"{p} is both trained on and evaluated on: its loss will be too good" for p in dict.fromkeys(twice)
    )
    return replace(blend, phases=tuple(phases), warnings=warnings)


def _checked(weights: Sequence[float], what: str, normalize: bool) -> tuple[float, ...]:
    if not all(math.isfinite(w) and w >= 0 for w in weights) or sum(weights) <= 0:
        raise ValueError(f"{what} must be 0 or more and not all 0; got {', '.join(f'{w:g}' for w in weights)}")
    total = math.fsum(weights)
    if abs(total - 1) > TOLERANCE and not normalize:
        listed = " + ".join(f"{w:g}" for w in weights)
        raise ValueError(f"{what} must sum to 1; {listed} = {total:g}; correct them, or give --normalize")
    return tuple(w / total for w in weights)


def token_counts(blend: Blend) -> dict[str, int]:
    """Tokens of each corpus, by prefix. Raises FileNotFoundError for one that is missing."""
    return {p: Index.open(p).num_tokens for p in blend.prefixes()}


STRATEGIES = ("proportional", "equal", "upweight:NAME=0.6", "token-balanced", "quality[:NAME=0.9,...]")


def apply_strategy(blend: Blend, strategy: str, counts: dict[str, int]) -> Blend:
    """The blend with the weights of its training corpora (and of the others, where they have none) set.

    `proportional`: by tokens, so every corpus is seen equally often. `equal`: the same share each. `upweight:NAME=0.6`:
    that share for NAME, the rest in proportion to tokens. `token-balanced`: inverse to tokens. `quality`: by the scores
    given here or in the YAML.
    """
    kind, _, argument = strategy.partition(":")
    sources = blend.train
    tokens = [counts[s.prefix] for s in sources]
    empty = [s.prefix for s, t in zip(sources, tokens) if t == 0]
    if empty:
        raise ValueError(f"a corpus of a blend must hold tokens; {empty[0]} is empty")
    if argument and kind not in ("upweight", "quality"):
        raise ValueError(f"--strategy {kind} takes no argument; got {argument!r}")
    if kind == "proportional":
        raw = [float(t) for t in tokens]
    elif kind == "equal":
        raw = [1.0] * len(sources)
    elif kind == "token-balanced":
        raw = [1 / t for t in tokens]
    elif kind == "upweight":
        raw = _upweight(sources, tokens, argument)
    elif kind == "quality":
        raw = _quality(sources, argument)
    else:
        raise ValueError(f"--strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}")
    train = tuple(replace(s, weight=w / math.fsum(raw)) for s, w in zip(sources, raw))
    others = {}
    for split in SPLITS[1:]:
        rows = blend.sources(split)
        if rows and rows[0].weight is None:
            total = sum(counts[s.prefix] for s in rows)
            others[split] = tuple(replace(s, weight=counts[s.prefix] / total) for s in rows)
    return check(replace(blend, train=train, phases=(), **others))


def _by_name(sources: Sequence[Source], argument: str, what: str) -> dict[int, float]:
    found = {}
    for item in filter(None, argument.split(",")):
        name, eq, value = item.partition("=")
        places = [i for i, s in enumerate(sources) if name in (s.name, s.prefix, Path(s.prefix).name)]
        if not eq or not _is_number(value) or len(places) != 1:
            names = ", ".join(s.name for s in sources)
            raise ValueError(f"{what} takes NAME=NUMBER with NAME one of {names}; got {item!r}")
        found[places[0]] = float(value)
    return found


def _upweight(sources: Sequence[Source], tokens: list[int], argument: str) -> list[float]:
    chosen = _by_name(sources, argument, "--strategy upweight:")
    share = math.fsum(chosen.values())
    rest = sum(t for i, t in enumerate(tokens) if i not in chosen)
    if not chosen or not 0 < share < 1 or not rest or min(chosen.values()) <= 0:
        raise ValueError(
            f"--strategy upweight:NAME=0.6 needs shares between 0 and 1 and a corpus left; got {argument!r}"
        )
    return [chosen[i] if i in chosen else (1 - share) * t / rest for i, t in enumerate(tokens)]


def _quality(sources: Sequence[Source], argument: str) -> list[float]:
    scores = {i: s.quality for i, s in enumerate(sources) if s.quality is not None}
    scores |= _by_name(sources, argument, "--strategy quality:")
    missing = [s.name for i, s in enumerate(sources) if i not in scores]
    if missing or min(scores.values()) < 0 or not any(scores.values()):
        what = f"{', '.join(missing)} has none" if missing else f"got {list(scores.values())}"
        raise ValueError(
            f"--strategy quality needs a score of 0 or more for each corpus, not all 0; {what}; give NAME=0.9"
        )
    return [scores[i] for i in range(len(sources))]


def mean_weights(blend: Blend) -> list[float]:
    """Weights of the training corpora over the whole training: those of the phases by their length, or the plain ones."""
    if not blend.phases:
        return [s.weight if s.weight is not None else 0.0 for s in blend.train]
    ends = [p.start for p in blend.phases[1:]] + [1.0]
    return [
        math.fsum((end - p.start) * p.weights[i] for p, end in zip(blend.phases, ends)) for i in range(len(blend.train))
    ]


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
    rows = zip(blend.train, mean_weights(blend))
    return [
        Exposure(s.name, s.prefix, w, counts[s.prefix], w * token_budget / max(1, counts[s.prefix])) for s, w in rows
    ]
