"""Entry points: those of installed packages, and of folders of this one."""

import functools
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

FILE = "entry_points.txt"
"""In folders of this package, in the form of installed ones: it needs no installation, and goes with its folder."""


@functools.cache
def _own() -> ConfigParser:
    own = ConfigParser(delimiters="=", interpolation=None)
    own.read(sorted(Path(__file__).parents[1].rglob(FILE)), encoding="utf-8")
    return own


def entry_points(group: str) -> list[metadata.EntryPoint]:
    """Those of a group, without what the current folder says it installs; this package's own last.

    A kernel has the current folder on its module path as "", so that a notebook imports the file next to it.
    """
    points = []
    for point in metadata.entry_points(group=group):
        if point.dist and Path(str(point.dist.locate_file(""))).is_absolute():
            points.append(point)
    if _own().has_section(group):
        points += [metadata.EntryPoint(name, value, group) for name, value in _own().items(group)]
    return points
