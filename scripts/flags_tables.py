"""Writes the tables of flags in docs/ anew, from the parsers that print `--help`.

A table stands between `<!-- flags: VERB -->` and `<!-- end of flags -->`. Run it after you change a flag.
"""

import importlib
import re
from pathlib import Path

from dfm_nb import cli

MARKED = re.compile(r"(?<=<!-- flags: )(\w+)( -->\n).*?(?=<!-- end of flags -->)", re.S)


def table(verb: str) -> str:
    """The flags of `dfm VERB` as rows of Markdown."""
    module = importlib.import_module(cli.verbs()[verb][0])
    rows = ["| flag | what it does | default |", "|---|---|---|"]
    for action in module.main.__self__.parser()._actions:
        meaning = f"one of {', '.join(action.choices)}: {action.help}" if action.choices else action.help
        default = "" if action.default in (None, False, [], "==SUPPRESS==") else action.default
        rows.append(f"| `{'`, `'.join(action.option_strings)}` | {meaning} | {default} |")
    return "\n".join(rows) + "\n"


def with_tables(page: str) -> str:
    """The page with its tables of flags written anew."""
    return MARKED.sub(lambda mark: mark[1] + mark[2] + table(mark[1]), page)


if __name__ == "__main__":
    for path in sorted(Path(__file__).parents[1].glob("docs/*.md")):
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
