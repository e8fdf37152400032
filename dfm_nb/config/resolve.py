"""Three layers of settings -> one typed, checked configuration, with the layer that each value came from.

What enters: a recipe's name (a YAML file of `dfm_nb/recipes`), a YAML file, and `group.key=value` strings; later layers
win. What leaves: `Resolved`, a `Config` of plain dataclasses and the origin of every key. Guarantees: nothing is
ignored in silence; unknown keys, wrong types, values out of range and settings that contradict one another are all
reported by one `ConfigError`, before any process group exists. Cost: milliseconds; torch is not imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dfm_nb.config import sizes
from dfm_nb.config.checks import Fault, check_fields, check_training, check_values, layout_faults
from dfm_nb.config.schema import Config, ModelConfig

__all__ = [
    "DERIVED",
    "Config",
    "ConfigError",
    "Fault",
    "Field",
    "ModelConfig",
    "Resolved",
    "check_layout",
    "describe_limits",
    "fields",
    "from_yaml",
    "print_config",
    "recipes",
    "resolve",
    "to_yaml",
]

RECIPES = Path(__file__).parent / "recipes"
DEFAULT, COMMAND_LINE = "default", "command line"
DERIVED = "derived"

REMOVED = {
    "model.qkv_format": "sequences are always packed (thd); remove the key",
    "dataset.qkv_format": "sequences are always packed (thd); remove the key",
    "checkpoint.load_optim": "use checkpoint.pretrained=PATH to start from weights alone",
    "model.kv_channels": "it is hidden_size / num_attention_heads; remove the key",
    "model.position_embedding_type": "positions are factorised 3-D; remove the key, or set model.rope=true for rotary ones beside them",
}
"""Keys of the reference implementation that have no counterpart, with what to do instead."""

OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch_size",
    "max_steps": "train.train_iters",
    "num_steps": "train.train_iters",
    "num_heads": "model.num_attention_heads",
    "depth": "model.num_layers",
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "precision": "mixed_precision",
    "warmup_steps": "scheduler.lr_warmup_iters",
    "dataset_path": "dataset.path",
}
"""What people call a key elsewhere, when spelling alone would lead astray."""


class ConfigError(ValueError):
    """One or more faults in the settings; `faults` holds them, the message has one line for each."""

    def __init__(self, faults: Iterable[Fault]):
        self.faults = list(faults)
        assert self.faults, "a ConfigError needs a fault"
        count = len(self.faults)
        head = "1 fault in the configuration" if count == 1 else f"{count} faults in the configuration"
        super().__init__(head + "".join(f"\n  {fault}" for fault in self.faults))

    def __reduce__(self):
        return type(self), (self.faults,)


@dataclass(frozen=True)
class Field:
    """What a form or a help page needs to know about one key."""

    key: str
    type: Any
    optional: bool
    default: Any
    help: str
    limits: Mapping[str, Any]

    @property
    def type_name(self) -> str:
        name = getattr(self.type, "__name__", str(self.type)) if not typing.get_args(self.type) else str(self.type)
        return f"{name} | None" if self.optional else name


def _walk(cls: type, prefix: str = "") -> Iterable[Field]:
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if dataclasses.is_dataclass(hint):
            yield from _walk(typing.cast(type, hint), f"{prefix}{f.name}.")
            continue
        optional = isinstance(hint, types.UnionType)
        if optional:
            (hint,) = [a for a in typing.get_args(hint) if a is not type(None)]
        default = f.default_factory() if callable(f.default_factory) else f.default
        limits = {k: v for k, v in f.metadata.items() if k != "help"}
        yield Field(prefix + f.name, hint, optional, default, f.metadata["help"], limits)


_FIELDS: dict[str, Field] = {f.key: f for f in _walk(Config)}
_GROUPS = {key.rpartition(".")[0] for key in _FIELDS} - {""}
_ALIASES = {alias: key for key, f in _FIELDS.items() for alias in f.limits.get("aliases", ())}


def fields() -> dict[str, Field]:
    """Every key with its type, default, help text and limits, in the order of the groups."""
    return dict(_FIELDS)


def recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(p.stem for p in RECIPES.glob("*.yaml"))


@dataclass(frozen=True)
class Resolved:
    """A configuration and, for each dotted key, the layer its value came from.

    config : the values, as dataclasses.
    provenance : `default`, `recipe NAME`, the YAML file's path, `command line`, or `derived: WHY`.
    """

    config: Config
    provenance: dict[str, str]

    def get(self, key: str) -> Any:
        """The value of a dotted key."""
        node: Any = self.config
        for name in key.split("."):
            node = getattr(node, name)
        return node

    def with_derived(self, values: Mapping[str, Any], why: str) -> Resolved:
        """A copy in which keys that are null take these values (from the data, for example); set keys stay as they are.

        Raises
        ------
        ConfigError : a value breaks the key's type or limits.
        """
        config, provenance = _copy(self.config), dict(self.provenance)
        tree = OmegaConf.structured(config)
        faults: list[Fault] = []
        for key, value in values.items():
            assert key in _FIELDS, key
            if self.get(key) is None and value is not None:
                faults += _assign(tree, key, value, why)
                provenance[key] = f"{DERIVED}: {why}"
        config = typing.cast(Config, OmegaConf.to_object(tree))
        out = Resolved(config, provenance)
        faults = faults or check_fields({k: out.get(k) for k in values}, _FIELDS, provenance)
        if faults:
            raise ConfigError(faults)
        return out


def _copy(config: Config) -> Config:
    return typing.cast(Config, OmegaConf.to_object(OmegaConf.structured(config)))


# ---- reading the layers: each becomes {dotted key: value} --------------------------------------------------------


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Leaves of a nested mapping; a mapping under a key that is no group is a leaf (and a fault later)."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in _FIELDS:
            yield from _flatten(value, key + ".")
        elif value is None and key in _GROUPS:
            continue  # `model:` with nothing below it
        elif not (isinstance(value, Mapping) and not value and key in _GROUPS):
            yield key, value


def _read_yaml(path: Path, what: str) -> tuple[dict[str, Any], list[Fault]]:
    """A YAML file as dotted keys; keys that a saved configuration marks as derived are left out, to be derived anew."""
    if not path.is_file():
        state = "is a folder" if path.is_dir() else "does not exist"
        return {}, [Fault("", what, "must be a YAML file", f"{path}, which {state}", "give the file's path")]
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True) if path.read_text().strip() else {}
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        text = " ".join(str(error).split())
        return {}, [Fault("", str(path), "must be readable YAML with each key once", text, "correct the file there")]
    if not isinstance(tree, dict):
        return {}, [
            Fault("", str(path), "must hold groups of keys", type(tree).__name__, "write `group:` and `  key: value`")
        ]
    origin = tree.pop("provenance", None) or {}
    leaves = {k: v for k, v in _flatten({str(k): v for k, v in tree.items()})}
    return {k: v for k, v in leaves.items() if not str(origin.get(k, "")).startswith(DERIVED)}, []


def _read_overrides(overrides: Iterable[str]) -> tuple[dict[str, Any], list[Fault]]:
    leaves: dict[str, Any] = {}
    faults: list[Fault] = []
    for text in overrides:
        key, eq, _ = text.partition("=")
        if not eq or not key.strip():
            faults.append(
                Fault("", COMMAND_LINE, "must be group.key=value", repr(text), "for example train.train_iters=100")
            )
            continue
        try:
            tree = OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=True)
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            shown = " ".join(str(error).split())
            faults.append(Fault(key, COMMAND_LINE, "must be a YAML value", shown, f"quote it: '{key}=\"...\"'"))
            continue
        key = key.strip()
        value: Any = tree
        for name in key.split("."):
            value = value[name]
        leaves.update(_flatten({key: value}) if isinstance(value, Mapping) else [(key, value)])
    return leaves, faults


def _nearest(key: str) -> str:
    """A fix for an unknown key: the nearest key by spelling, by its last name, or the group's keys."""
    if key in REMOVED:
        return REMOVED[key]
    known = [*_FIELDS, *_ALIASES]
    group, _, name = key.rpartition(".")
    same_name = [k for k in _FIELDS if k.rpartition(".")[2] == name]
    if name in OTHER_NAMES and not same_name:
        return f"did you mean {OTHER_NAMES[name]}?"
    if same_name:
        return f"did you mean {same_name[0]}?"
    in_group = [k for k in known if k.startswith(group + ".")] if group else []
    near = difflib.get_close_matches(key, in_group, 1, cutoff=0.6) or difflib.get_close_matches(
        key, known, 1, cutoff=0.6
    )
    if not near:
        by_name = {k.rpartition(".")[2]: k for k in known}
        near = [by_name[n] for n in difflib.get_close_matches(name, by_name, 1, cutoff=0.75)]
    if near:
        return f"did you mean {near[0]}?"
    if in_group:
        return f"keys of {group}: {', '.join(k.rpartition('.')[2] for k in in_group if k in _FIELDS)}"
    return f"groups: {', '.join(sorted(g for g in _GROUPS if '.' not in g))}, mixed_precision"


def _canonical(leaves: dict[str, Any], layer: str) -> tuple[dict[str, Any], list[Fault]]:
    """Aliases to names, synonyms to values; unknown keys and keys given twice under two names become faults."""
    out: dict[str, Any] = {}
    faults: list[Fault] = []
    spelled: dict[str, str] = {}
    for given, value in leaves.items():
        key = _ALIASES.get(given, given)
        if key in _GROUPS:
            faults.append(Fault(given, layer, "is a group of keys", repr(value), f"write {given}.KEY=VALUE"))
        elif key not in _FIELDS:
            faults.append(Fault(given, layer, "is not a key", _shown(value), _nearest(given)))
        elif key in out and out[key] != value:
            must = f"is the same key as {spelled[key]}"
            faults.append(Fault(given, layer, must, f"{out[key]!r} and {value!r}", "keep one of the two"))
        else:
            out[key], spelled[key] = value, given
    return out, faults


def _expand_size(leaves: dict[str, Any], layer: str) -> tuple[dict[str, Any], dict[str, str], list[Fault]]:
    """`model.size` sets layers, width and heads in its own layer, below what that layer sets itself."""
    name = leaves.get("model.size")
    if name is None:
        return leaves, dict.fromkeys(leaves, layer), []
    try:
        row = sizes.find_size(str(name))
    except ValueError as error:
        _, _, fix = str(error).partition("; did you mean ")
        must = f"must be one of {', '.join(sizes.SIZES)}"
        return (
            leaves,
            dict.fromkeys(leaves, layer),
            [
                Fault(
                    "model.size", layer, must, repr(name), f"did you mean {fix}" if fix else "choose a row of sizes.py"
                )
            ],
        )
    leaves = {**leaves, "model.size": row.name}
    from_row = {f"model.{k}": v for k, v in row.settings().items() if f"model.{k}" not in leaves}
    origin = {**dict.fromkeys(leaves, layer), **dict.fromkeys(from_row, f"size {row.name} ({layer})")}
    return {**leaves, **from_row}, origin, []


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _must_be(f: Field) -> str:
    inner = typing.get_args(f.type)
    if not inner:
        word = _WORDS[f.type]
    elif typing.get_args(inner[0]):
        word = f"a list of lists of {f.limits['entry_len']} whole numbers"
    else:
        word = {str: "a list of texts", float: "a list of numbers", int: "a list of whole numbers"}[inner[0]]
    return f"must be {word}" + (" or null" if f.optional else "")


def _assign(tree: Any, key: str, value: Any, layer: str) -> list[Fault]:
    f = _FIELDS[key]
    value = f.limits.get("synonyms", {}).get(str(value), value)
    example = f"the default is {OmegaConf.to_yaml({'x': f.default}, resolve=False).removeprefix('x:').strip()}"
    if typing.get_args(f.type):
        example = f"for example {key.rpartition('.')[2]}=[...], with commas between the entries"
    elif value is None and not f.optional:
        example = f"leave it out to take the default, {f.default!r}"
    wrong = [Fault(key, layer, _must_be(f), _shown(value), example)]
    if value == "???" or (f.type is str and isinstance(value, (Mapping, list))):
        return wrong
    if f.type is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1e4 is how people write ten thousand
    if f.type is bool and not isinstance(value, (bool, str)):
        return wrong
    try:
        OmegaConf.update(tree, key, value, merge=False)
    except OmegaConfBaseException:
        return wrong
    return []


def resolve(
    recipe: str | None = "default",
    config_file: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    training: bool = False,
    world_size: int | None = None,
) -> Resolved:
    """Settle every key: defaults < recipe < YAML file < `group.key=value`.

    Parameters
    ----------
    recipe : a name of `recipes()`, a path of a YAML file, or None for the bare defaults.
    config_file : a YAML file of groups and keys; a saved `config.yaml` of a run is one.
    overrides : strings `group.key=value`, the value in YAML notation; the last one wins.
    training : also require what a training run needs (a data set that exists, or `dataset.mock=true`).
    world_size : also require that the parallel layout fits this number of processes (`check_layout`).

    Raises
    ------
    ConfigError : every fault of every layer at once.
    """
    faults: list[Fault] = []
    layers: list[tuple[str, dict[str, Any]]] = []
    if recipe is not None:
        path = RECIPES / f"{recipe}.yaml"
        name = f"recipe {recipe}"
        if recipe in recipes():
            leaves, found = _read_yaml(path, name)
        elif recipe.endswith((".yaml", ".yml")):
            leaves, found = _read_yaml(Path(recipe), name)
        else:
            near = difflib.get_close_matches(recipe, recipes(), 1)
            fix = f"did you mean {near[0]}?" if near else "or the path of a .yaml file"
            leaves, found = (
                {},
                [Fault("recipe", COMMAND_LINE, f"must be one of {', '.join(recipes())}", repr(recipe), fix)],
            )
        layers.append((name, leaves))
        faults += found
    if config_file is not None:
        leaves, found = _read_yaml(Path(config_file), "--config-file")
        layers.append((str(config_file), leaves))
        faults += found
    leaves, found = _read_overrides(overrides)
    layers.append((COMMAND_LINE, leaves))
    return _settle(layers, faults + found, training, world_size)


def _settle(
    layers: list[tuple[str, dict[str, Any]]], faults: list[Fault], training: bool, world_size: int | None
) -> Resolved:
    tree = OmegaConf.structured(Config)
    provenance = dict.fromkeys(_FIELDS, DEFAULT)
    bad: set[str] = set()
    for layer, raw in layers:
        leaves, found = _canonical(raw, layer)
        leaves, origin, more = _expand_size(leaves, layer)
        faults += found + more
        bad |= {f.key for f in more}
        for key, value in leaves.items():
            wrong = _assign(tree, key, value, layer)
            faults += wrong
            provenance[key] = origin[key]
            (bad.add if wrong else bad.discard)(key) if key != "model.size" else None
    resolved = _derive(Resolved(typing.cast(Config, OmegaConf.to_object(tree)), provenance))
    config = resolved.config
    found = check_fields({k: resolved.get(k) for k in _FIELDS if k not in bad}, _FIELDS, resolved.provenance)
    bad |= {f.key for f in found}
    faults += found
    faults += [f for f in check_values(config, resolved.provenance) if not bad & {f.key, *f.also}]
    if training:
        faults += check_training(config, resolved.provenance)
    layout_keys = {k for k in bad if k.startswith(("model.", "train.", "dataset.task"))}
    if world_size is not None and not layout_keys:
        faults += layout_faults(config, world_size, resolved.provenance)
    if faults:
        raise ConfigError(faults)
    return resolved


def _derive(resolved: Resolved) -> Resolved:
    """Fill the nulls that follow from other keys."""
    config, provenance = resolved.config, resolved.provenance
    if config.model.ffn_hidden_size is None:
        config.model.ffn_hidden_size = 4 * config.model.hidden_size
        provenance["model.ffn_hidden_size"] = f"{DERIVED}: 4 * model.hidden_size"
    if config.scheduler.lr_decay_iters is None:
        config.scheduler.lr_decay_iters = config.train.train_iters
        provenance["scheduler.lr_decay_iters"] = f"{DERIVED}: train.train_iters"
    if config.scheduler.lr_warmup_iters is None:
        config.scheduler.lr_warmup_iters = min(100, config.train.train_iters // 10)
        provenance["scheduler.lr_warmup_iters"] = f"{DERIVED}: min(100, train.train_iters / 10)"
    return resolved


def check_layout(config: Config, world_size: int) -> list[str]:
    """Every reason why the parallel layout does not fit the model, the batch or the number of processes.

    Pure: no process group is touched. Each reason is one line that names the nearest legal values; [] means it fits.

    Parameters
    ----------
    world_size : processes of the job; TP * PP * CP must divide it, and the quotient is DP.
    """
    return [str(fault) for fault in layout_faults(config, world_size)]


# ---- writing and showing ------------------------------------------------------------------------------------------


def to_yaml(resolved: Resolved) -> str:
    """The whole configuration as YAML, with a `provenance` map of the keys that are not defaults.

    The text is a legal `--config-file`; keys marked as derived are derived again when it is read as one.
    """
    tree = OmegaConf.to_container(OmegaConf.structured(resolved.config))
    assert isinstance(tree, dict)
    tree["provenance"] = {k: v for k, v in resolved.provenance.items() if v != DEFAULT}
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def from_yaml(source: str | Path) -> Resolved:
    """Read a configuration that `to_yaml` wrote; the values come back as they were saved, derived ones included.

    Parameters
    ----------
    source : the file.

    Raises
    ------
    FileNotFoundError : there is no such file.
    ConfigError : a key or value is not legal in this version.
    """
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no configuration file; a run folder keeps one as config.yaml")
    leaves, faults = _read_yaml(path, str(path))
    origin: dict[str, str] = {}
    if not faults:
        saved: Any = OmegaConf.to_container(OmegaConf.load(path))
        origin = saved.pop("provenance", None) or {}
        leaves = dict(_flatten(saved))
    resolved = _settle([(str(path), leaves)], faults, False, None)
    known = {k: str(origin.get(k, DEFAULT)) for k in _FIELDS}
    return Resolved(resolved.config, known)


def print_config(resolved: Resolved, explain: bool = False) -> str:
    """A table of every key, its value and the layer it came from; with `explain`, its type and help text too."""
    rows = []
    for key, f in _FIELDS.items():
        value = resolved.get(key)
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        row = [key, text, resolved.provenance[key]]
        rows.append(row + [f"{f.help} ({describe_limits(f)})"] if explain else row)
    head = ["key", "value", "from"] + (["meaning"] if explain else [])
    widths = [min(60, max(len(r[i]) for r in [head, *rows])) for i in range(len(head) - 1)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(r, widths)), r[-1]]).rstrip() for r in [head, *rows]]
    rule = "  ".join(["-" * w for w in widths] + ["-" * len(head[-1])])
    return "\n".join([lines[0], rule, *lines[1:]])


def describe_limits(f: Field) -> str:
    """The type and limits of a key in words: `int, >= 1, packs`."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    parts = [f.type_name]
    parts += [f"{signs[k]} {f.limits[k]}" for k in signs if k in f.limits]
    if "choices" in f.limits:
        parts.append(" | ".join(f.limits["choices"]))
    if "multiple_of" in f.limits:
        parts.append(f"a multiple of {f.limits['multiple_of']}")
    if "unit" in f.limits:
        parts.append(f.limits["unit"])
    return ", ".join(parts)
