"""Runs the code blocks of a documentation page, in order, in an empty folder; what the tests of all pages share.

Every ```bash and ```python block is run; ```text, ```yaml and the like are shown only. `dfm`, `python` and `torchrun`
are forks: see `tests.processes`.
"""

import os
import re
import stat
import subprocess
import time
from collections import Counter
from pathlib import Path

import nbformat

from tests.processes import commands

ROOT = Path(__file__).parents[2]
RUN = ("bash", "python")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)


class Page:
    """A page of the documentation by its path from the root; of a notebook its text."""

    def __init__(self, name: str):
        self.path = ROOT / name
        self.text = self.path.read_text(encoding="utf-8")
        if name.endswith(".ipynb"):
            cells = nbformat.reads(self.text, 4).cells
            self.text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        self.fences = [(language, _dedent(code, len(pad))) for pad, language, code in FENCE.findall(self.text)]
        self.blocks = [(language, code) for language, code in self.fences if language in RUN]

    def links(self) -> list[str]:
        """Targets of links and pictures that are paths."""
        prose = FENCE.sub("", self.text)
        found = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
        return [t for t in found if "://" not in t and not t.startswith("mailto:")]

    def missing_links(self) -> list[str]:
        """Those that lead to no file, or to no heading of it."""
        return [t for t in self.links() if not self._resolves(t)]

    def _resolves(self, target: str) -> bool:
        path, _, anchor = target.partition("#")
        file = (self.path.parent / path).resolve() if path else self.path
        if not file.exists() or not file.is_relative_to(ROOT):
            return False
        return not anchor or anchor in anchors(file.read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ +(.*?) *$", FENCE.sub("", text), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", t).lower() for t in titles]
    seen: Counter[str] = Counter()
    found = set()
    for title in plain:
        anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        found.add(anchor + (f"-{seen[anchor]}" if seen[anchor] else ""))
        seen[anchor] += 1
    return found


def _dedent(code: str, pad: int) -> str:
    return "\n".join(line[pad:] if line[:pad].isspace() else line for line in code.split("\n"))


def all_pages() -> list[Path]:
    """README, CONTRIBUTING, SECURITY, AGENTS, every page under docs/, deploy/ and skills/, and notebooks."""
    top = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "AGENTS")]
    below = ("docs/**/*.md", "deploy/**/*.md", "skills/**/*.md", "notebooks/*.ipynb", "docs/notebooks/*.ipynb")
    return [*top, *(path for pattern in below for path in sorted(ROOT.glob(pattern)))]


# ---- running ------------------------------------------------------------------------------------------------------


# `hf download` without a network: it takes the pages' arguments and copies files from the folder $HUB.
HF = """#!/usr/bin/env bash
set -euo pipefail
[ "$1" = download ]; name=$2; shift 2; files=()
while [ $# -gt 0 ]; do
  case $1 in
    --local-dir) folder=$2; shift 2;;
    --repo-type) [ "$2" = dataset ]; shift 2;;
    --include) files+=($(cd "$HUB/$name" && compgen -G "$2" || true)); shift 2;;
    -*) echo "hf: $1?" >&2; exit 2;;
    *) files+=("$1"); shift;;
  esac
done
[ ${#files[@]} -gt 0 ] || files=(.)
for file in "${files[@]}"; do
  mkdir -p "$folder/$(dirname "$file")" && cp -r "$HUB/$name/$file" "$folder/$(dirname "$file")"
done
"""


class Desk:
    """A folder to run blocks in, with its environment; `said` gathers all that they print."""

    def __init__(self, folder: Path, env: dict[str, str]):
        self.folder, self.env, self.said = folder, env, ""

    def tool(self, name: str, script: str) -> None:
        """A command of this desk alone, before all others on the PATH."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self, language: str, code: str) -> str:
        """Run one block; an AssertionError shows it with what it printed when it fails."""
        start = {"bash": ["bash", "-euo", "pipefail", "-c", code], "python": ["python", "-c", code]}[language]
        began = time.monotonic()
        how = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "timeout": 900}
        done = subprocess.run(start, cwd=self.folder, env=self.env, **how)
        print(f"{time.monotonic() - began:6.1f} s  {code.strip().splitlines()[0]}", flush=True)
        assert done.returncode == 0, f"{code}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        # of two torchruns, the one with the store may leave first; the other then logs that, and ends well
        said = done.stderr
        if "Error waiting on exit barrier" in said:
            said = re.sub(r"(?m)^E.*elastic/agent/server/api\.py:\d+\].*\n?", "", said)
        assert "Traceback" not in said, f"{code}\n{done.stderr[-4000:]}"
        self.said += done.stdout + done.stderr
        return done.stdout

    def run_page(self, page: Page) -> str:
        for language, code in page.blocks:
            self.run(language, code)
        return self.said


def desk(folder: Path, hub: Path | None = None, **environment: str) -> Desk:
    """A desk in `folder`.

    Parameters
    ----------
    hub : a folder of repositories, which `hf download` copies from. environment : added for all blocks.
    """
    env = commands().environment(HUB=str(hub), **environment)
    env["PATH"] = os.pathsep.join([str(folder / "bin"), env["PATH"]])
    here = Desk(folder, env)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    if hub is not None:
        here.tool("hf", HF)
    return here
