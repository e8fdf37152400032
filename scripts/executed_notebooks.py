"""The executed notebooks as HTML pages for the docs: no kernel, no network, no paths of this machine.

    python scripts/executed_notebooks.py [--output build/docs/notebooks]

They run headless with their defaults, in order, in one folder, like a reader would run them: about 12 minutes on two
cores. The times are printed and listed in index.html.
"""

from __future__ import annotations

import argparse
import html
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PROJECT = "~/butterflies"


def without_places(page: str, folder: Path) -> str:
    """The page with the project's folder as `~/butterflies`.

    Raises
    ------
    ValueError : the page contains another path of this machine.
    """
    for place in (folder.resolve(), folder):
        page = page.replace(str(place), PROJECT)
    left = [place for place in {str(ROOT), sys.prefix, str(Path.home())} - {"/"} if f"{place}/" in page]
    if left:
        at = page.index(f"{left[0]}/")
        raise ValueError(f"a path of this machine is on the page: {page[at - 60 : at + 60]!r}")
    return page


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", type=Path, default=ROOT / "build" / "docs" / "notebooks")
    args = p.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "butterflies"
        folder.mkdir()
        for name in NOTEBOOKS:
            began = time.monotonic()
            words = ["notebook", "run", str(ROOT / "notebooks" / f"{name}.ipynb"), "--output", f"{place}/{name}.ipynb"]
            subprocess.run([sys.executable, "-m", "dfm_nb", *words, "--quiet"], cwd=folder, check=True)
            took = time.monotonic() - began
            page = without_places(Path(place, f"{name}.html").read_text(encoding="utf-8"), folder)
            (args.output / f"{name}.html").write_text(page, encoding="utf-8")
            rows.append(f'<li><a href="{name}.html">{html.escape(name)}</a>, {took:.0f} s</li>')
            print(f"{name}: {took:.0f} s, {len(page) / 1e6:.1f} MB", flush=True)
    head = '<!doctype html><meta charset="utf-8"><title>Notebooks</title><h1>The notebooks after a run</h1>'
    (args.output / "index.html").write_text(f"{head}<ul>{''.join(rows)}</ul>", encoding="utf-8")


if __name__ == "__main__":
    main()
