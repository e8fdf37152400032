"""Sources, tokenizers and text encoders are plugins: the file's name is the plugin's name, there is no list to keep.

A plugin module has a `build(...)` function. To add one, add one file to `dfm_nb/<kind>/`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType

KINDS = ("sources", "tokenizers", "text_encoders")


def names(kind: str) -> list[str]:
    """Names of the plugins of a kind, sorted."""
    package = importlib.import_module(f"dfm_nb.data.{kind}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load(kind: str, name: str) -> ModuleType:
    """Import `dfm_nb.<kind>.<name>`; ValueError names the nearest plugin when there is none of that name."""
    if kind not in KINDS:
        raise ValueError(f"a plugin kind must be one of {', '.join(KINDS)}; got {kind!r}")
    known = names(kind)
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{kind}: there is no {name!r} (available: {', '.join(known)}){hint}")
    return importlib.import_module(f"dfm_nb.data.{kind}.{name}")
