"""The YAML of settings: `1e-4` is a number, a date is text, duplicate keys are errors, no placeholders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator

from dfm_nb.base.options import plain

_FLOAT = "tag:yaml.org,2002:float"
_SCIENTIFIC = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
"""YAML 1.1 requires a point and a sign in 1.0e-4; people omit them."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {name}", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that `_Loader` would read as another type."""


_Loader.add_implicit_resolver(_FLOAT, _SCIENTIFIC, list("-+.0123456789"))
_Dumper.add_implicit_resolver(_FLOAT, _SCIENTIFIC, list("-+.0123456789"))


def read(text: str) -> Any:
    """The value of a YAML text; ValueError with a one-sentence reason."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # on odd tags PyYAML's constructors raise KeyError, IndexError, AttributeError, ...
        raise ValueError(" ".join(str(error).split())) from None


def write(tree: Any) -> str:
    """A tree as multi-line YAML."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def write_value(value: Any) -> str:
    """A value in one line, as in `group.key=VALUE`."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").strip("\n")  # other whitespace belongs to the text


def _override_words(overrides: str | Iterable[str] | Mapping[str, Any]) -> list[str]:
    if isinstance(overrides, str):
        return [overrides]
    if isinstance(overrides, Mapping):
        return [f"{key}={json.dumps(value, default=plain)}" for key, value in overrides.items()]
    return [str(word) for word in overrides]


Overrides = Annotated[list[str], BeforeValidator(_override_words)]
"""Words `group.key=value`, or a mapping {"group.key": value} or {"group": {"key": value}} that is converted to them."""
