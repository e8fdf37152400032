"""HTML: the one place where text becomes a part of it. Every other module fills in templates that it holds itself."""

import html
import string
from typing import Any


class Html(str):
    """Text that is HTML: of `fill`, or a constant."""


class _Filler(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, list):
            return "".join(self.format_field(each, format_spec) for each in value)
        return value if isinstance(value, Html) else html.escape(format(value, format_spec))


def fill(template: str, *values: object) -> Html:
    """`template.format(*values)` with each value escaped, for a place between tags or in an attribute in double quotes.

    `Html` is not escaped again; the items of a list follow each other.

    >>> fill('<b title="{}">{}</b>', 'a "b"', [fill("<i>{:.1f}</i>", 2), "<c>"])
    '<b title="a &quot;b&quot;"><i>2.0</i>&lt;c&gt;</b>'
    """
    return Html(_Filler().format(template, *values))
