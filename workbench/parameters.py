"""A notebook checks its own parameters in its second cell: mistakes come before any work."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from dfm_nb import config as cfg
from dfm_nb.config import notation

WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list",
    "dict": "a mapping",
}


def check_parameters(
    settings: Mapping[str, Any] | None = None,
    *,
    recipe: str = "demo",
    num_processes: int = 1,
    prepare: Mapping[str, Any] | None = None,
    generate: Mapping[str, Any] | None = None,
) -> None:
    """Check the parameters of the notebook that calls: their types as annotated, and what they are used for.

    Parameters
    ----------
    settings : {group.key: value} of a training with this recipe on `num_processes`.
    prepare : {flag: value} of `dfm prepare`. generate : {flag: value} of `dfm generate`.

    Raises
    ------
    ValueError : a sentence for each mistake, the first one first.

    >>> check_parameters({"train.train_iters": 300})      # doctest: +SKIP
    """
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    space = frame.f_back.f_globals
    wrong = [
        f"{name} must be {WORDS.get(kind.__name__, kind.__name__)}; got {space[name]!r}"
        for name, kind in ((n, typing.get_origin(a) or a) for n, a in space.get("__annotations__", {}).items())
        if not _is(space[name], kind)
    ]
    if wrong:
        raise ValueError("; ".join(wrong))
    if num_processes < 1:
        raise ValueError(f"num_processes must be at least 1; got {num_processes}")
    overrides = [f"{key}={notation.write_value(value)}" for key, value in (settings or {}).items()]
    cfg.resolve(recipe, overrides=overrides, world_size=num_processes)
    if prepare is not None:
        from workbench.form import PrepareForm

        PrepareForm("-", prepare).check()
    if generate is not None:
        from dfm_nb.generation.request import Request

        Request("", **generate).check()


def _is(value: Any, kind: type) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)
