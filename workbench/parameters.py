"""A notebook checks its parameters in its second cell, so that errors come before any work."""

import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dfm_nb import config as cfg
from dfm_nb.base.options import must
from dfm_nb.config import notation

KINDS = (int, float, bool, str, list, dict)
"""The types that a parameter may have."""


def as_type(name: str, kind: Any, value: Any, strict: bool = False) -> Any:
    """A parameter's value in its type; ValueError if it does not fit. strict : text is not accepted as a number."""
    try:
        return TypeAdapter(kind).validate_python(value, strict=strict)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"parameter {name!r} {must(fault['msg'])}; got {fault['input']!r}") from None


def check_parameters(
    settings: Mapping[str, Any] | None = None,
    *,
    recipe: str = "demo",
    num_processes: int = 1,
    prepare: Mapping[str, Any] | None = None,
    generate: Mapping[str, Any] | None = None,
) -> None:
    """Check the parameters of the calling notebook: their annotated types, and the settings that use them.

    Parameters
    ----------
    settings : {group.key: value} of a training with this recipe on `num_processes`.
    prepare : {flag: value} of `dfm prepare`. generate : {flag: value} of `dfm generate`.

    Raises
    ------
    ValueError : the first error.

    >>> check_parameters({"train.train_iters": 300})      # doctest: +SKIP
    """
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    space = frame.f_back.f_globals
    for name, kind in space.get("__annotations__", {}).items():
        union = typing.get_origin(kind) in (typing.Union, types.UnionType)
        allowed = [each for each in typing.get_args(kind) if each is not types.NoneType] if union else [kind]
        if all((typing.get_origin(each) or each) in KINDS for each in allowed):
            as_type(name, kind, space[name], strict=True)
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
