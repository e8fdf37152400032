"""Sources, tokenizers, text encoders, networks, samplers and loggers are plugins, found by name: entry points.

A name may also be `module:name`, what a module of the path has under that name, where a person typed it (`trust`): on
the command line, in Python, in a recipe or `--config-file`. No other module is imported by its name: data, checkpoints,
clips and run folders, whoever reads them, can only name what is installed.

To add one, add a module with a function `build`: here, one file in `dfm_nb/data/<kind>/` and its name in
`dfm_nb/data/entry_points.txt`; in your own package, an entry point, for example for a source that is then
`dfm prepare --source moths`:

    [project.entry-points."dfm_nb.sources"]
    moths = "their_package.moths"

Entry points of `dfm_nb.networks` are classes (`config.networks`), of `dfm_nb.samplers` and `dfm_nb.loggers` functions
(`diffusion.samplers`, `training.report`), of `dfm_nb.pretrained` folders of packaged models, of `dfm_nb.exams` classes
such as `butterflies.exam.Exam`, of `dfm_nb.displays` and `dfm_nb.dials` modules such as `display` and
`planner.minutes`, and of `dfm_nb.plots` functions of a `Run` that has ended.

The module of the others (a class, or the function `build` alone, will do) is called as `build(spec_or_table, **flags)`
of a source, `build(path, device=..., **flags)` of a tokenizer, and `build(path, device=..., max_tokens=..., **flags)`
of a text encoder, whose `identity()` must hold `max_tokens`: prompts are cut where captions were. `path` is None
without a file.

The module may also have:

- `check()`, which raises ValueError or OSError if something is missing on this machine, for `dfm doctor`;
- `class Flags(Options)`, its own flags of `dfm prepare`, each with a default (`wing_grey: int | None = option(None,
  "moths: how bright")` is `--wing-grey`); given flags are keywords of `build`, and plug-ins with the same flag name
  share the flag (`tokenizer_window` is also a flag of `dfm generate`: a field of `Request`, passed to
  `decode_windows` as `window`);
- tokenizers: `SHORT_SIDE_PX`, the picture size it was trained for; `CARRIED = True` if its file is small and contains
  encoder and decoder, so that data sets include it; `fit(videos)`, if it is fitted to the data, which returns a
  tokenizer with `save(path)`; `tune(tokenizer, videos, minutes)`, which trains one in place for `--fit-tokenizer` and
  leaves its latents as they are (videos uint8 [3, T, H, W]);
- text encoders: `BUNDLED = True` if its weights are a package, so that no path is needed and nothing is downloaded;
- sources: a parameter `size_px` of `build`, if it renders pictures at the requested size; `FETCHES = True` if opening
  it may download; `TOKENIZER`, the name of the one that it is prepared with by default.
"""

import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import create_model

from dfm_nb.base.argv import meant
from dfm_nb.base.installed import entry_points
from dfm_nb.base.options import Field, Options, Values, fields

PASSED: dict[str, list[str]] = {"sources": [], "tokenizers": ["device"], "text_encoders": ["device", "max_tokens"]}
"""Keywords of `build` in addition to its own flags."""
MODULE_NAME = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
_typed: set[str] = set()


@functools.cache
def _found(kind: str) -> dict[str, EntryPoint]:
    """The modules of a kind's plug-ins, by name.

    Names are only looked up here, never imported, so that a name in a manifest cannot load another module.
    """
    return {point.name: point for point in entry_points(f"dfm_nb.{kind}")}  # ours are last: no package replaces one


def names(kind: str) -> list[str]:
    """Names of a kind's plug-ins, sorted."""
    return sorted(_found(kind))


def is_module_name(name: object) -> bool:
    """Whether it has the form `module:name`."""
    return isinstance(name, str) and re.fullmatch(MODULE_NAME, name) is not None


def trust(*values: object) -> None:
    """Let names of modules in what a person typed be imported: of texts, and of texts in lists and mappings."""
    for value in values:
        if isinstance(value, str):
            _typed.update(re.findall(MODULE_NAME, value))
        elif isinstance(value, Mapping):
            trust(*value.values())
        elif isinstance(value, (list, tuple)):
            trust(*value)


def is_foreign(name: object) -> bool:
    """Whether it names a module that nobody typed."""
    return is_module_name(name) and name not in _typed


def source_and_spec(text: str) -> tuple[str, str]:
    """A source's name and what follows: folder and DIR of `folder:DIR`, a:b and DIR of `a:b:DIR` with no source `a`."""
    name, _, spec = text.partition(":")
    module = re.match(f"({MODULE_NAME})(?::(.*))?$", text)
    if module and name not in _found("sources"):
        return module[1], module[2] or ""
    return name, spec


def find(kind: str, name: str, own: Iterable[str] = ()) -> Any:
    """What an entry point has under that name, or a module as `module:name` where a person typed it.

    own : further names there are, for the message. ValueError names the nearest one when there is none.
    """
    point = _found(kind).get(name)
    if is_foreign(name) and not point:
        flag = f"--{kind[:-1].replace('_', '-')}"
        if kind in ("tokenizers", "text_encoders"):
            flag += "-path"
        raise ValueError(f"{name!r} is a module, whose code would run, and only you may name it: pass {flag} {name}")
    why = ""
    try:
        if point:
            return point.load()
        if is_module_name(name):
            return code(name)
    except (ImportError, AttributeError) as error:
        why = f", and {error}"
    known = sorted({*own, *names(kind)})
    fix = meant(name.partition(":")[0], known, "choose one of those, or module:name")
    raise ValueError(f"{kind}: there is no {name!r} (available: {', '.join(known)}){why}; {fix}")


def code(name: str) -> Any:
    """What `module:name` is, where installed code says it."""
    return EntryPoint(name, name, "").load()


def load(kind: str, name: str) -> Any:
    """The plugin of that name; ValueError also says what its `build` lacks."""
    module = find(kind, name)
    if not hasattr(module, "build") and callable(module):
        module = SimpleNamespace(build=module)
    try:
        inspect.signature(module.build).bind(None, **dict.fromkeys((*PASSED[kind], *own_flags(module))))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{kind}: {name} must have a `build` as described in dfm_nb.base.plugins; {error}") from None
    return module


def load_saved(kind: str, name: str, path: str | Path | None) -> tuple[Any, str | Path | None]:
    """The plugin that a manifest names and its path, or `module:name` that the user gives as its path."""
    if is_module_name(path):
        trust(path)
        return load(kind, str(path)), None
    return load(kind, name), path


def carried(name: str, folder: Path) -> Path | None:
    """`folder`, if data or a checkpoint there include this tokenizer's file; ValueError if that would run code.

    TorchScript files are programs, so a folder may only include tokenizers that consist of tensors.
    """
    if not (folder / "tokenizer.safetensors").is_file():
        return None
    if not getattr(load("tokenizers", name), "CARRIED", False):
        raise ValueError(
            f"{folder} includes a file of the tokenizer {name}, which is a program and is not run: remove its "
            f"tokenizer.safetensors to use the hub's {name}, or pass a copy that you trust with --tokenizer-path"
        )
    return folder


def load_all(kind: str) -> dict[str, Any]:
    """All plug-ins of a kind by name."""
    return {name: _found(kind)[name].load() for name in names(kind)}


def own_flags(module: ModuleType) -> Mapping[str, Field]:
    """The flags that a plug-in declares, by name."""
    return fields(getattr(module, "Flags", Options))


def flags(kind: str) -> dict[str, Field]:
    """The flags of all plug-ins of a kind, by name."""
    return fields(_joined(kind))


def all_flags() -> type[Options]:
    """The flags of all kinds, as one model."""
    return _joined(*PASSED)


@functools.cache
def _joined(*kinds: str) -> type[Options]:
    every: Values = {}
    for kind in kinds:
        for module in load_all(kind).values():
            own = getattr(module, "Flags", Options).model_fields
            every |= {name: (info.annotation, info) for name, info in own.items()}
    return create_model("Flags", __base__=Options, **every)


def takes(module: ModuleType, parameter: str) -> bool:
    """Whether the plug-in's `build` has a parameter of that name."""
    return parameter in inspect.signature(module.build).parameters


def options_of(kind: str, name: str, given: Values) -> Values:
    """The entries of `given` that are for this plug-in, as keywords for its `build`; other kinds' are ignored.

    Raises
    ------
    ValueError : an entry is for other plug-ins of this kind; the message lists them, and this one's flags.
    """
    own = own_flags(load(kind, name))
    strange = {n: flag.flag for n, flag in flags(kind).items() if n in given and n not in own}
    if strange:
        usable = ", ".join(flag.flag for flag in own.values()) or "no such flags"
        others = [n for n, module in load_all(kind).items() if strange.keys() & own_flags(module).keys()]
        raise ValueError(
            f"--{kind[:-1].replace('_', '-')} {name} does not use {', '.join(strange.values())}, "
            f"which is for {', '.join(others)}; it accepts {usable}"
        )
    return {n: given[n] for n in own if n in given}
