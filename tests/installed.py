"""Packages that pip has installed, by what it leaves in a folder."""

from pathlib import Path


def install(place: Path, name: str, entry_points: str) -> None:
    about = place / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)
