"""Entry points of installed packages."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path


def entry_points(group: str) -> list[metadata.EntryPoint]:
    """Those of a group, without what the current folder says it installs.

    A kernel has the current folder on its module path as "", so that a notebook imports the file next to it.
    """
    points = metadata.entry_points(group=group)
    return [point for point in points if point.dist and Path(str(point.dist.locate_file(""))).is_absolute()]
