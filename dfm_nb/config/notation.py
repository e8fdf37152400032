"""The YAML of settings: `1e-4` is a number, `010` and a date are text; no duplicate keys, aliases or merge keys."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator

from dfm_nb.base.limits import MOST_TEXT
from dfm_nb.base.options import plain

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
"""Numbers as people write them. YAML 1.1 has 8 for 010 and 90 for 1:30, and requires a point and a sign in 1.0e-4."""


def _resolvers(*kinds: str) -> dict:
    """YAML 1.1's rules for plain scalars, of these kinds alone."""
    chosen = {}
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items():
        chosen[first] = [(tag, rule) for tag, rule in rules if tag.removeprefix(_TAG) in kinds]
    return chosen


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers("null", "bool", "merge")

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # a few lines of them may mean more than fits into memory
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "found an alias; write its value out", mark)
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuse merge keys: `<<` stays, and nothing constructs it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.items():
            if count > 1:
                raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {name}", node.start_mark)
        return super().construct_mapping(node, deep)


class _Words(_Loader):
    """Plain scalars are text, except null."""

    yaml_implicit_resolvers = _resolvers("null", "merge")


class _Dumper(yaml.SafeDumper):
    """Quotes every string that `_Loader`, or a reader of YAML 1.1, would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _resolver in (_Loader, _Dumper):
    _resolver.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
    _resolver.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


def read(text: str, words: bool = False) -> Any:
    """The value of a YAML text; ValueError with a one-sentence reason. words : scalars other than null stay text."""
    try:
        if len(text) > MOST_TEXT:
            raise ValueError(f"it must have at most {MOST_TEXT >> 20} MiB; it has {len(text) >> 20}")
        return yaml.load(text, _Words if words else _Loader)
    except Exception as error:  # on odd tags PyYAML's constructors raise KeyError, IndexError, AttributeError, ...
        raise ValueError(" ".join(str(error).split())) from None


def read_text(word: str) -> str | None:
    """A shell's word for a setting that is text: as it is, unless it is empty, `null` or quoted as `write_value` does.

    >>> [read_text(word) for word in ("1.10", "set #2", "null", "'null'")]
    ['1.10', 'set #2', None, 'null']
    """
    if word[:1] in ("'", '"'):
        with contextlib.suppress(ValueError):
            value = read(word)
            return value if isinstance(value, str) else word
    return None if word in ("", "null") else word


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
        values = json.loads(json.dumps(dict(overrides), default=plain))
        return [f"{key}={write_value(value)}" for key, value in values.items()]
    return [str(word) for word in overrides]


Overrides = Annotated[list[str], BeforeValidator(_override_words)]
"""Words `group.key=value`, or a mapping {"group.key": value} or {"group": {"key": value}} that is converted to them."""
