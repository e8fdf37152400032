"""The networks that tests of the core are repeated with: the DiT's own cases, and those of each integration's tests."""

import importlib
import pkgutil
from types import SimpleNamespace

import torch

from tests import integrations


def cases(kind: str, own: dict) -> dict:
    """`own`, and the cases of that kind in `tests/integrations/*/__init__.py`."""
    names = [m.name for m in pkgutil.iter_modules(integrations.__path__, f"{integrations.__name__}.") if m.ispkg]
    return own | {k: v for name in names for k, v in getattr(importlib.import_module(name), kind, {}).items()}


def samples(grids: list[tuple[int, int, int]], text_dim: int) -> list[SimpleNamespace]:
    """What `noised` takes, one of each of four grids, with noise levels from weak to strong."""
    g = torch.Generator().manual_seed(4)
    out = []
    for i, grid in enumerate(grids):
        x, noise = torch.randn(2, 16, *grid, generator=g)
        text = torch.randn(3 + i, text_dim, generator=g)
        sigma, fps = (0.3, 2.0, 20.0, 0.05)[i], (24.0, 30.0, 12.0, 8.0)[i]
        out.append(SimpleNamespace(key=f"{i}", latent=x, noise=noise, text=text, sigma=sigma, fps=fps))
    return out
