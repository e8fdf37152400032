"""Importing megatron-core in a third of the time: what it imports for features that this project does not use is left out.

Enters: nothing; `dfm_nb` calls `install()`. Leaves: a hook around the first import of `megatron.core`, by whichever module.
Guarantees: the left-out packages can be imported afterwards as ever; a megatron.core that was imported before stays as it is.
Cost: every process of a run imports it. On one core (3.11, megatron-core 0.16.1) `import dfm_nb.train` took 12 s of CPU time, and takes 4.

- `multistorageclient` (checkpoints and indexed data sets on `msc://` addresses) compiles a grammar of IRIs, by way of jsonschema.
- `wandb` and `tensorboard` serve megatron's own logging; `dfm_nb.loggers` imports them where they are configured.
- `torch.compile` decorates fused operations, which imports Inductor. On CUDA that stays; on a CPU the plain functions are used.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator

PACKAGE = "megatron.core"
LEFT_OUT = ("multistorageclient", "wandb", "tensorboard")


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Within: `LEFT_OUT` cannot be imported, and without a CUDA device `torch.compile` gives back what it gets."""
    import torch

    absent = [name for name in LEFT_OUT if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: the import system raises ModuleNotFoundError
    compile_ = torch.compile
    if not torch.cuda.is_available():
        torch.compile = lambda model=None, **_: (lambda f: f) if model is None else model  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_
        for name in absent:
            del sys.modules[name]


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader):
        self.inner = inner

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module) -> None:
        module.__loader__ = module.__spec__.loader = self.inner
        with lean_imports():
            self.inner.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Make the first import of megatron.core a lean one; once, and not where it is imported already."""
    if PACKAGE not in sys.modules and not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
