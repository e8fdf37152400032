"""Three layers of settings become one typed, checked configuration that records which layer each value came from.

Unknown keys, wrong types, values out of range and conflicting settings are reported together, by one `ConfigError`,
before any process group exists; torch is not imported. Types and limits are pydantic's; layers, aliases and messages
are ours, because pydantic's errors contain neither a layer nor a fix.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from dfm_nb.base import options, plugins, pretrained, run
from dfm_nb.base.argv import meant, nearest
from dfm_nb.base.files import plain
from dfm_nb.base.log import warn_once
from dfm_nb.config import networks, notation, samples, sizes
from dfm_nb.config.checks import Fault, faults_of, shown, value_faults
from dfm_nb.config.schema import FIELDS, CheckpointConfig, Config, ModelConfig

__all__ = [
    "DERIVED",
    "FIELDS",
    "OF_SAMPLES",
    "Config",
    "ConfigError",
    "Fault",
    "Leaves",
    "ModelConfig",
    "Resolved",
    "describe_limits",
    "flatten",
    "from_yaml",
    "print_config",
    "recipes",
    "resolve",
    "text_type",
    "to_yaml",
]

RECIPES = {p.stem: p for p in Path(__file__).parents[1].rglob("recipes/*.yaml")}
DEFAULT, COMMAND_LINE = "default", "command line"
DERIVED, WEIGHTS = "derived", "weights of"
OF_SAMPLES = ("generation.sizes", "generation.captions", "generation.given", "generation.other.")  # of fa46f34c
MODULES = ("generation.sampler", "logger.report_to")  # keys that may be `module:name`
START = "checkpoint.pretrained"
DIALLED = f"{DERIVED}: train.minutes,"
LASTING = ("model.", START)  # what other minutes do not change in a run that has begun
PACKAGED = {DEFAULT, *(f"recipe {name}" for name in RECIPES)}  # layers that a user has not written

_GROUPS = {key.rpartition(".")[0] for key in FIELDS} - {""}
_UPSTREAM = notation.read(Path(__file__).with_name("upstream.yaml").read_text(encoding="utf-8"))
_ALIASES: dict[str, str] = _UPSTREAM["aliases"]
_INSTEAD: dict[str, str] = _UPSTREAM["instead"]
Leaves = dict[str, Any]
"""Settings by dotted key."""

IMPLIED: dict[str, tuple[list[Any], str]] = {
    key: (values, why) for why, keys in _UPSTREAM["implied"].items() for key, values in keys.items()
}
"""Keys of NeMo DFM and Megatron-Bridge with their allowed values ([]: any), and the reasons."""

FOLLOWERS: dict[str, tuple[Callable[[Config], int], str]] = {
    "model.ffn_hidden_size": (lambda c: 4 * c.model.hidden_size, "4 * model.hidden_size"),
    "scheduler.lr_decay_iters": (lambda c: c.train.train_iters, "train.train_iters"),
    "scheduler.lr_warmup_iters": (lambda c: min(100, c.train.train_iters // 10), "min(100, train.train_iters / 10)"),
}
"""Keys that are derived from other keys while they are null, and how."""

EXCLUSIVE = (("dataset.mock", "dataset.path"), ("checkpoint.load", "checkpoint.load_checkpoint"))
"""Exclusive pairs: a layer that sets one of them overrides the other in lower layers."""


class ConfigError(ValueError):
    """One or more errors in the settings: `faults`, with one line each in the message."""

    def __init__(self, faults: Iterable[Fault]):
        self.faults = list(faults)
        lines = [f"{len(self.faults)} faults in the configuration", *map(str, self.faults)]
        super().__init__(lines[1] if len(self.faults) == 1 else "\n  ".join(lines))

    def __reduce__(self) -> tuple[type[Self], tuple[list[Fault]]]:
        return type(self), (self.faults,)


def recipes() -> list[str]:
    """Names of the packaged recipes."""
    return sorted(RECIPES)


@dataclass(frozen=True)
class Resolved:
    """A configuration and, for each dotted key, the layer its value came from.

    config : the values.
    provenance : `default`, `recipe NAME`, `weights of PATH`, the YAML file's path, `command line`, or
        `derived: WHY`.
    notices : settings without effect, a sentence each.
    """

    config: Config
    provenance: dict[str, str]
    notices: tuple[str, ...] = ()

    def get(self, key: str) -> Any:
        """The value of a dotted key."""
        return attrgetter(key)(self.config)

    def with_derived(self, values: Leaves, why: str) -> "Resolved":
        """A copy in which keys that are null or `auto` get these values (from the data, for example).

        Raises
        ------
        ConfigError : a value breaks the key's type or limits.
        """
        new = {k: v for k, v in values.items() if v is not None and self.get(k) in (None, "auto")}
        return self._with(new, dict.fromkeys(new, f"{DERIVED}: {why}"))

    @property
    def is_dialled(self) -> bool:
        """Whether `train.minutes` has set its settings (`dfm_nb.planner.minutes`), not only those of a run before."""
        return any(v.startswith(DIALLED) for k, v in self.provenance.items() if not k.startswith(LASTING))

    def is_free(self, key: str) -> bool:
        """Whether the value comes from a default or a packaged recipe."""
        return self.provenance[key] in PACKAGED

    def dialled(self, values: Mapping[str, tuple[Any, str]]) -> "Resolved":
        """A copy in which free keys get these values, with these reasons."""
        new = {k: v for k, v in values.items() if self.is_free(k)}
        if "model.size" in new:
            name, why = new.pop("model.size")
            network, _ = _expand_size({"model.size": name}, DIALLED)
            if all(self.is_free(k) or self._follows(k) for k in network):
                new |= {k: (v, f"{why} ({name})") for k, v in network.items()}
        reasons = {k: f"{DIALLED} {why}" for k, (_, why) in new.items()}
        return self._with({k: v for k, (v, _) in new.items()}, reasons)

    def _follows(self, key: str) -> bool:
        """Whether the value was null and is derived from other keys."""
        return key in FOLLOWERS and self.provenance[key].startswith(DERIVED)

    def _with(self, values: Leaves, origin: dict[str, str]) -> "Resolved":
        """A copy with these values, in which values that follow from other keys are derived again."""
        if not values:
            return self
        leaves = {k: None if self._follows(k) else self.get(k) for k in FIELDS} | values
        provenance = self.provenance | origin
        try:
            config = _config(leaves).with_samples(self.config.samples)
        except ValidationError as error:
            raise ConfigError(value_faults(error, leaves, provenance)) from None
        return _derive(replace(self, config=config, provenance=provenance))


def _config(leaves: Leaves) -> Config:
    """Dotted keys as a `Config`."""
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return Config.model_validate(tree)


# ---- reading the layers: each becomes {dotted key: value} --------------------------------------------------------


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Leaves of a nested mapping; a mapping under a key that is not a group is a leaf (and a fault later)."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in _GROUPS and (value is None or value == {}):
            continue  # an empty `model:`
        # YAML can hold cycles
        if isinstance(value, Mapping) and value and key not in FIELDS and key.count(".") < 3:
            yield from flatten(value, key + ".")
        else:
            yield key, value


def _read_yaml(path: Path) -> tuple[Leaves, dict[str, str], Leaves]:
    """A YAML file as dotted keys, with the provenance of a saved configuration; ConfigError if it is not one.

    The third are what fa46f34c saved of the training samples as settings, and older settings that hold it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = notation.read(text) or {}
        words = notation.read(text, words=True) or {}
        if not isinstance(tree, dict):
            raise ValueError(f"{shown(tree)} in it")
    except (ValueError, OSError) as error:  # UnicodeDecodeError is a ValueError
        must = "must be a readable YAML file of groups and keys, with each key once"
        fault = Fault("", must, str(error), "correct the file, or its path", origin=str(path))
        raise ConfigError([fault]) from None
    told = tree.pop("provenance", None)
    provenance = {str(k): str(v) for k, v in told.items()} if isinstance(told, dict) else {}
    leaves = _leaves(tree, words)
    sampled = {f"generation.{name}" for name in samples.SETTINGS}
    of_samples = {}
    for key in [*leaves]:
        derived = key in sampled and provenance.get(key, "").startswith(DERIVED)
        if derived or key.startswith(OF_SAMPLES):
            of_samples[key] = leaves.pop(key)
    return leaves, provenance, of_samples


def text_type(key: str) -> Any:
    """`str` or `list[str]`, if a key's value is text whatever it looks like, else None."""
    f = FIELDS.get(_ALIASES.get(key, key))
    return f.type if f and f.type in (str, list[str]) and "choices" not in f.limits else None


def _leaves(tree: Mapping[Any, Any], words: Mapping[Any, Any]) -> Leaves:
    """Leaves of a tree; a key that is text has its words: 1.10 is a folder, not a number; one text is a list of one."""
    leaves = dict(flatten(tree))
    for key, word in dict(flatten(words)).items():
        kind = text_type(key)
        if kind and key in leaves and isinstance(word, str | list):
            leaves[key] = [word] if kind == list[str] and isinstance(word, str) else word
    return leaves


def _recipe_file(recipe: str | Path) -> Path:
    """The file of a packaged recipe by its name, or of another recipe by its path."""
    name = str(recipe)
    if name in RECIPES or name.endswith((".yaml", ".yml")):
        return RECIPES.get(name, Path(recipe))
    fix = meant(name, recipes(), "or pass the path of a .yaml file")
    must = f"must be one of {', '.join(recipes())}"
    raise ConfigError([Fault("recipe", must, shown(recipe), fix, origin=COMMAND_LINE)])


def _read_overrides(overrides: Iterable[str], below: Iterable[Leaves]) -> tuple[Leaves, list[Fault]]:
    """`key=value`; Hydra's `+key=value` and `++key=value` are the same, and `~key` removes it from lower layers."""
    leaves: Leaves = {}
    faults = []
    for text in overrides:
        key, eq, value = text.lstrip("+~").partition("=")
        key = key.strip()
        if text.startswith("~"):
            gone = f"{_ALIASES.get(key, key)}."  # a key, or a group of them
            known = key in (*FIELDS, *_ALIASES, *_GROUPS, *IMPLIED)
            for layer in (leaves, *below):
                for k in [*layer]:
                    if f"{_ALIASES.get(k, k)}.".startswith(gone):
                        del layer[k]
                        known = True
            if not known:
                faults.append(Fault(key, "is not a key", shown(text), _fix_of_unknown(key), origin=COMMAND_LINE))
        elif not eq or not key:
            fix = "for example train.train_iters=100"
            faults.append(Fault("", "must be group.key=value", shown(text), fix, origin=COMMAND_LINE))
        elif text_type(key) is str:
            leaves[key] = notation.read_text(value)
        elif text_type(key) and value.strip()[:1] not in ("[", "") and value.strip() != "null":
            leaves[key] = [notation.read_text(value)]  # one text of a list, whatever is in it
        else:
            try:
                leaves |= _leaves({key: notation.read(value)}, {key: notation.read(value, words=True)})
            except ValueError as error:
                fix = f"quote it: '{key}=\"...\"'"
                faults.append(Fault(key, "must be a YAML value", str(error), fix, origin=COMMAND_LINE))
    return leaves, faults


# ---- names of keys ------------------------------------------------------------------------------------------------


def _fix_of_unknown(key: str) -> str:
    """The fix for an unknown key: the closest key, or the list of groups."""
    instead = _INSTEAD.get(key) or _INSTEAD.get(key.partition(".")[0])
    if instead:
        return instead
    group, _, name = key.rpartition(".")
    every = [*FIELDS, *_ALIASES]
    for known in ([k for k in every if k.startswith(f"{group}.")], every):
        names = {k.rpartition(".")[2]: k for k in reversed(known)}
        near = nearest(name, names, 0.7)
        if near:
            return f"did you mean {names[near]}?"
    return f"dfm pretrain --print-config lists the keys; groups: {', '.join(sorted(_GROUPS))}"


def _known(leaves: Leaves, layer: str) -> tuple[Leaves, list[str], list[Fault]]:
    """The layer with the names of `FIELDS`; a notice for each reason to omit keys; faults.

    Faults are an unknown key or size, a key given twice under two names, and a key of `IMPLIED` with another value.
    """
    own: Leaves = {}
    spelled: dict[str, str] = {}
    needless: dict[str, list[str]] = {}
    faults = []
    for given, value in leaves.items():
        key = _ALIASES.get(given, given)
        values, why = IMPLIED.get(given) or IMPLIED.get(given.rpartition(".")[2]) or (None, "")
        if values is not None:
            if not values or value in values:
                needless.setdefault(why, []).append(given)
                continue
            must = f"must be {' or '.join(map(notation.write_value, values))} or left out"
            fix = _INSTEAD.get(given, why)
        elif key in _GROUPS:
            must = "is a group of keys"
            fix = f"write {given}.KEY=VALUE"
        elif key not in FIELDS:
            must = "is not a key"
            fix = _fix_of_unknown(given)
        elif key == "model.size" and isinstance(value, str) and not sizes.find_size(value):
            must = f"must be one of {', '.join(sizes.SIZES)}"
            fix = meant(value, sizes.SIZES, "choose a row of sizes.py")
        elif key in own and own[key] != value:
            must = f"is the same key as {spelled[key]}, which is {shown(own[key])}"
            fix = "keep one of the two"
        else:
            own[key] = value
            spelled[key] = given
            continue
        faults.append(Fault(given, must, shown(value), fix, origin=layer))
    return own, [f"{', '.join(keys)} ({layer}) can be omitted: {why}" for why, keys in needless.items()], faults


def _expand_size(leaves: Leaves, layer: str) -> tuple[Leaves, dict[str, str]]:
    """`model.size` and `model.variant` set keys of the network in their own layer, below the layer's explicit keys."""
    values = dict(leaves)
    origin = dict.fromkeys(leaves, layer)
    size: Mapping[str, Any] = {}
    row = sizes.find_size(leaves.get("model.size"))
    if row:
        values["model.size"] = row
        size = sizes.SIZES[row]
    variant = leaves.get("model.variant", size.get("variant"))
    settings = networks.find(variant).settings if variant in networks.names() else {}
    for source, keys in ((f"variant {variant}", settings), (f"size {row}", size)):
        new = {f"model.{k}": v for k, v in keys.items() if f"model.{k}" not in values}
        values |= new
        origin |= dict.fromkeys(new, f"{source} ({layer})")
    return values, origin


# ---- settling -----------------------------------------------------------------------------------------------------


def resolve(
    recipe: str | None = "default",
    config_file: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    training: bool = False,
    world_size: int | None = None,
    settings_of: Callable[[str], Leaves] | None = None,
    run_dir: str | Path | None = None,
) -> Resolved:
    """Settle every key: defaults < packaged recipe < weights to start from < YAML file < `group.key=value`.

    Parameters
    ----------
    recipe : a name of `recipes()`, a path of a YAML file, or None for the bare defaults.
    config_file : a YAML file of groups and keys, for example a run's saved `config.yaml`.
    overrides : strings `group.key=value`, the value in YAML notation; the last one wins.
    training : also require what a training run needs (a data set that exists, or `dataset.mock=true`).
    world_size : also require that the parallel layout fits this number of processes.
    settings_of : `checkpoint.pretrained` -> the settings by dotted key that come with these weights.
    run_dir : where the training writes. The `config.yaml` of a resumed run, there or where `checkpoint.load` and
        `load_checkpoint` point, is the highest layer for values that the run got from a default, recipe, size or
        weights that are still requested, and for resolved `auto` values, because the package may have changed.

    Raises
    ------
    ConfigError : every fault of every layer at once.
    """
    layers: dict[str, Leaves] = {}
    faults: list[Fault] = []
    for layer, path, find in ((f"recipe {recipe}", recipe, _recipe_file), (str(config_file), config_file, Path)):
        if path is None:
            continue
        try:
            leaves, origin, _ = _read_yaml(find(path))
            plugins.trust(*leaves.values())
        except ConfigError as error:
            faults += error.faults
        else:  # values that a saved configuration marks as derived are derived again
            layers[layer] = {k: v for k, v in leaves.items() if not origin.get(k, "").startswith(DERIVED)}
    overrides = list(overrides)
    plugins.trust(overrides)
    layers[COMMAND_LINE], unreadable = _read_overrides(overrides, list(layers.values()))
    merged, wrong = _merge(layers)
    begun = None if faults or wrong or unreadable else _begun(merged.config.checkpoint, run_dir)
    stored = from_yaml(begun) if begun else merged  # merged: nothing differs, so nothing is kept
    saved = begun is not None and _has_checkpoint(begun, stored.config.checkpoint)
    start = merged.get(START)
    # a run that has a checkpoint keeps what it took from its first weights, which may be gone or
    # trained further
    if settings_of and start and not saved and pretrained.weights_path(start).exists():
        # a user's recipe is above the weights, and that of a student above its teacher
        own = recipe not in recipes() or "model.student" in layers.get(f"recipe {recipe}", {})
        below = {} if own else {f"recipe {recipe}": layers.pop(f"recipe {recipe}")}
        below[f"{WEIGHTS} {start}"] = settings_of(start)
        layers = below | layers
        merged, wrong = _merge(layers)
    faults += unreadable + wrong
    if begun is None:
        stored = merged
    if saved and not merged.is_free(START):
        now = merged.get(START)
        then = stored.get(START)
        if now != then and None in (now, then):
            must = f"must be {shown(then)}, from which the run of {begun} began"
            faults.append(Fault(START, must, shown(now), "leave it out, or give another --run-dir"))
    kept = _kept(merged, stored, saved)
    settled = merged._with(kept, dict.fromkeys(kept, f"run {begun}"))
    faults += _untyped_modules(settled)
    _check(settled, [*layers, f"run {begun}"], faults, faults_of(settled.config, training, world_size, saved))
    told = [k for k in kept if merged.get(k) != "auto" and not stored.provenance[k].startswith(WEIGHTS)]
    stays = [f"{k} stays {kept[k]}, as in {begun}; new runs use {merged.get(k)}" for k in told]
    provenance = settled.provenance | {k: stored.provenance[k] for k in kept}
    return Resolved(settled.config, provenance, (*settled.notices, *stays))


def _untyped_modules(settled: Resolved) -> list[Fault]:
    """Settings that name a module, which the user has not: somebody else may have written those of weights and runs."""
    faults = []
    for key in MODULES:
        value = settled.get(key)
        if any(map(plugins.is_foreign, value if isinstance(value, list) else [value])):
            fix = f"set {key} yourself, if you trust that module"
            must = "must name no module, as its code would run"
            faults.append(Fault(key, must, shown(value), fix, origin=settled.provenance[key]))
    return faults


def _begun(start: CheckpointConfig, run_dir: str | Path | None) -> Path | None:
    """The configuration of the run to resume, if there is one."""
    for place in (start.load_checkpoint, start.load, run_dir):
        if not place:
            continue
        path = run.written_path(place)
        for folder in (path, *sorted(path.glob("iter_*"), reverse=True)):
            if (folder / "config.yaml").is_file():
                return folder / "config.yaml"
    return None


def _has_checkpoint(begun: Path, start: CheckpointConfig) -> bool:
    """Whether the run of a configuration has saved a checkpoint, or it is one's."""
    here = begun.parent
    roots = [here / "checkpoints", here]
    if start.checkpoint_dir:
        roots.append(Path(start.checkpoint_dir))
    return run.is_iteration(here) or any(map(run.iteration_folders, roots))


def _kept(merged: Resolved, stored: Resolved, saved: bool) -> Leaves:
    """The `stored` values that differ from `merged` ones and that a resumed run keeps."""

    def source(origin: str) -> str:
        """`default`, `recipe NAME`, `size NAME` or `weights of PATH`; empty for what a user has set or is derived."""
        name = origin.partition(" (")[0]
        return name if name in PACKAGED or name.startswith(("size ", WEIGHTS)) else ""

    def keeps(key: str) -> bool:
        began, now = stored.provenance[key], source(merged.provenance[key])
        if merged.get(key) == "auto":
            return began.startswith(DERIVED) or source(began) != ""
        dialled = began.startswith(DIALLED) and (same_minutes or key.startswith(LASTING))
        return now != "" and (now == source(began) or began.startswith(WEIGHTS) or dialled or (saved and key == START))

    same_minutes = merged.config.train.minutes == stored.config.train.minutes
    left = {"model.size", "model.variant"}  # the settings behind these names are kept key by key
    if merged.config.checkpoint.load_checkpoint:  # the other way to start
        left.add(START)
    differ = [k for k in FIELDS if stored.get(k) != merged.get(k) and k not in left]
    return {k: stored.get(k) for k in differ if keeps(k)}


def _merge(layers: Mapping[str, Leaves]) -> tuple[Resolved, list[Fault]]:
    """Merge layers, lowest first. What one lacks or refuses is told with its name."""
    values: Leaves = {}
    provenance = dict.fromkeys(FIELDS, DEFAULT)
    notices = []
    faults: list[Fault] = []
    for layer, raw in layers.items():
        own, needless, unknown = _known(raw, layer)
        leaves, origin = _expand_size(own, layer)
        for key, other in (*EXCLUSIVE, *(pair[::-1] for pair in EXCLUSIVE)):
            if leaves.get(key) and values.get(other):
                notices.append(f"{key} ({layer}) overrides {other}={values.pop(other)} ({provenance[other]})")
                provenance[other] = f"{DERIVED}: {key}"
        values |= leaves
        provenance |= origin
        notices += needless
        faults += unknown
    try:
        config = _config(values)
    except ValidationError as error:
        refused = value_faults(error, values, provenance)
        for fault in refused:
            del values[fault.key]
        config = _config(values)
        faults += refused
    return _derive(Resolved(config, provenance, tuple(notices))), faults


def _check(resolved: Resolved, layers: list[str], faults: list[Fault], broken: list[Fault]) -> None:
    """Raise the faults of the layers and those of broken rules together, if there are any."""
    # A rule about a rejected value would report the default instead.
    bad = {fault.key for fault in faults}
    rules = [_blame(f, resolved.provenance, layers) for f in broken if bad.isdisjoint((f.key, *f.also))]
    if faults or rules:
        raise ConfigError([*faults, *rules])


def _blame(fault: Fault, provenance: Mapping[str, str], layers: list[str]) -> Fault:
    """Name the highest layer among the keys of a broken rule: the user's setting rather than the recipe's."""
    origins = [provenance.get(key, "") for key in (fault.key, *fault.also)]
    # `size DiT-S (recipe default)` is of that recipe
    named = (origin for layer in reversed(layers) for origin in origins if layer in origin)
    return replace(fault, origin=next(named, fault.origin))


def _derive(resolved: Resolved) -> Resolved:
    """Fill the nulls that are derived from other keys."""
    for key, (value, why) in FOLLOWERS.items():
        if resolved.get(key) is None:
            group, name = key.split(".")
            setattr(getattr(resolved.config, group), name, value(resolved.config))
            resolved.provenance[key] = f"{DERIVED}: {why}"
    return resolved


# ---- writing and showing ------------------------------------------------------------------------------------------


def to_yaml(resolved: Resolved) -> str:
    """The complete configuration as YAML, with a `provenance` map of the keys that are not defaults.

    The text is a valid `--config-file`; keys marked as derived are derived again when it is read as one.
    """
    provenance = {k: v for k, v in resolved.provenance.items() if v != DEFAULT}
    return notation.write(resolved.config.model_dump() | {"provenance": provenance})


def from_yaml(source: str | Path) -> Resolved:
    """Read a configuration that `to_yaml` wrote, with the saved values, including derived ones.

    Keys outside `model` that this version does not have are skipped with a warning: they do not affect the network.

    Raises
    ------
    FileNotFoundError : there is no such file.
    ConfigError : a key or value is not valid in this version.
    """
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a configuration file; a run folder has one as config.yaml")
    leaves, provenance, of_samples = _read_yaml(plain(path))
    known = {*FIELDS, *_ALIASES, *IMPLIED}
    unknown = [k for k in leaves if k not in known and not k.startswith("model.")]
    if unknown:
        # once, although the configurations of a run and of its checkpoint are both read
        warn_once("keys of another version of dfm_nb are skipped: %s", ", ".join(unknown))
    resolved, faults = _merge({str(path): {k: v for k, v in leaves.items() if k not in unknown}})
    _check(resolved, [str(path)], faults, faults_of(resolved.config))
    config = resolved.config
    if of_samples:
        own = {f"generation.{name}": value for name, value in config.generation.model_dump().items()}
        config = config.with_samples(samples.TrainingSamples.of_settings(own | of_samples))
    return Resolved(config, {k: provenance.get(k, DEFAULT) for k in FIELDS})


def print_config(resolved: Resolved) -> str:
    """A table of every key, its value, the layer it came from, its help text and limits."""
    rows = [("key", "value", "from", "meaning")]
    for key, f in FIELDS.items():
        value = resolved.get(key)
        text = "null" if value is None else str(value)
        if isinstance(value, bool):
            text = text.lower()
        rows.append((key, text, resolved.provenance[key], f"{f.help} ({describe_limits(f)})"))
    widths = [min(60, max(map(len, column))) for column in zip(*rows)]
    lines = []
    for *cells, meaning in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths)]
        lines.append("  ".join([*padded, meaning]))
    return "\n".join(lines)


def describe_limits(f: options.Field) -> str:
    """The type and limits of a key in words: `int, >= 1`."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "a multiple of"}
    parts = [f.type_name]
    parts += [f"{sign} {f.limits[name]}" for name, sign in signs.items() if name in f.limits]
    if "choices" in f.limits:
        parts.append(" | ".join(f.limits["choices"]))
    return ", ".join(parts)
