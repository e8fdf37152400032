"""Sources, tokenizers and text encoders are plugins: the file's name is the plugin's name, there is no list to keep.

To add one, add one file to `dfm_nb/data/<kind>/` with a function `build`. It may also have:

- `FLAGS`, its own flags of `dfm prepare`, which reach `build` as keywords (`tokenizer_window` is a flag of
  `dfm generate` too: a field of `Request`, which reaches `encode` and `decode_windows` as `window`);
- tokenizers: `SHORT_SIDE_PX`, the picture size it was made for; `CARRIED = True` when its file is small and holds
  encoder and decoder, so that data sets take it along; `fit(videos)`, when it is fitted to the data, which
  returns a tokenizer that has `save(path)`;
- text encoders: `PATH_FLAG`, another name for `--text-encoder-path`; `BUNDLED = True` when its weights are a package,
  so that no path is needed and nothing is fetched;
- sources: a parameter `size_px` of `build`, when it makes pictures at the size that is asked for; `FETCHES = True`
  when opening it may download.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dfm_nb.base.nearest import nearest

KINDS = ("sources", "tokenizers", "text_encoders")


@dataclass(frozen=True)
class Flag:
    """A flag that a plugin brings along.

    name : the keyword of the plugin's `build`; `clip_frames` is `--clip-frames` on the command line. Plugins that share
        a name share the flag.
    type : makes the value from the word on the command line; bool is a flag without a word.
    """

    name: str
    help: str
    type: Callable[[str], Any] = str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


def names(kind: str) -> list[str]:
    """Names of the plugins of a kind, sorted."""
    package = importlib.import_module(f"dfm_nb.data.{kind}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load(kind: str, name: str) -> ModuleType:
    """Import `dfm_nb.data.<kind>.<name>`; ValueError names the nearest plugin when there is none of that name."""
    if kind not in KINDS:
        raise ValueError(f"a plugin kind must be one of {', '.join(KINDS)}; got {kind!r}")
    known = names(kind)
    if name not in known:
        near = nearest(name, known)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"{kind}: there is no {name!r} (available: {', '.join(known)}){hint}")
    return importlib.import_module(f"dfm_nb.data.{kind}.{name}")


def check_carried(module: ModuleType, name: str, folder: Path, flag: str) -> None:
    """ValueError unless this tokenizer may come from a folder of data or a checkpoint: one of tensors only may."""
    if not getattr(module, "CARRIED", False):
        raise ValueError(
            f"{folder} names the tokenizer {name}, whose files are programs that run, and brings its own file; "
            f"no program is taken from a folder of data or a checkpoint: remove tokenizer.safetensors there to use the "
            f"hub's {name}, or pass a copy that you trust with {flag}"
        )


def load_all(kind: str) -> dict[str, ModuleType]:
    """All plugins of a kind by name."""
    return {name: load(kind, name) for name in names(kind)}


def own_flags(module: ModuleType) -> tuple[Flag, ...]:
    """The flags that a plugin declares."""
    return getattr(module, "FLAGS", ())


def flags(kind: str) -> dict[str, Flag]:
    """The flags of all plugins of a kind by name."""
    return {flag.name: flag for module in load_all(kind).values() for flag in own_flags(module)}


def takes(module: ModuleType, parameter: str) -> bool:
    """Whether the plugin's `build` has a parameter of that name."""
    return parameter in inspect.signature(module.build).parameters


def options_of(kind: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `given` that are for this plugin, as keywords for its `build`; other kinds' are left out.

    Raises
    ------
    ValueError : an entry is for other plugins of this kind; the message says for which, and what this one takes.
    """
    module = load(kind, name)
    own = [flag.name for flag in own_flags(module)]
    strange = [flag.option for flag in flags(kind).values() if flag.name in given and flag.name not in own]
    if strange:
        usable = ", ".join(flag.option for flag in own_flags(module)) or "no such flags"
        others = [n for n, m in load_all(kind).items() if any(flag.option in strange for flag in own_flags(m))]
        raise ValueError(
            f"--{kind[:-1].replace('_', '-')} {name} has no use for {', '.join(strange)}, "
            f"which is for {', '.join(others)}; it takes {usable}"
        )
    return {option: given[option] for option in own if option in given}
