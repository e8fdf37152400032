"""HTML: the one place where text becomes a part of it. Every other module fills in templates that it holds itself."""

import html


class Html(str):
    """Text that is HTML: of `fill`, or a constant."""


def fill(template: str, *values: object) -> Html:
    """`template.format(*values)` with each value escaped, for a place between tags or in an attribute in double quotes.

    `Html` is not escaped again; the items of a list follow each other. Halves of characters, as in names that are not
    UTF-8, become `?`: a page with them could not be written.

    >>> fill('<b title="{}">{}</b>', 'a "b"', [fill("<i>{}</i>", 2), "<c>"])
    '<b title="a &quot;b&quot;"><i>2</i>&lt;c&gt;</b>'
    """
    return Html(template.format(*map(_escaped, values)))


def _escaped(value: object) -> str:
    if isinstance(value, list):
        return "".join(map(_escaped, value))
    return value if isinstance(value, Html) else html.escape(str(value).encode(errors="replace").decode())
