"""docs/extending.md: its package is installed in a folder, by what pip would leave there, and its commands run."""

import json
import tomllib

import pytest

from tests.docs.docs_pages import Page, desk

PAGE = Page("docs/extending.md")


@pytest.mark.slow
def test_the_package_of_the_page_is_found_and_used(tmp_path):
    code, toml, commands = (next(c for kind, c in PAGE.fences if kind == name) for name in ("python", "toml", "bash"))
    place = tmp_path / "site"
    about = place / "moths-1.0.dist-info"
    about.mkdir(parents=True)
    (place / "moths.py").write_text(code)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: moths\nVersion: 1.0\n")
    groups = tomllib.loads(toml)["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    # the server of forks has looked for entry points without the package
    dfm = f"import sys; sys.path.insert(1, '{place}'); from dfm_nb.base import plugins; plugins._found.cache_clear(); "
    here = desk(tmp_path)
    here.tool("dfm", f"""#!/bin/sh\nexec python -c "{dfm}from dfm_nb.cli import entry; entry()" "$@"\n""")
    here.run("bash", commands)
    manifest = json.loads((tmp_path / "data/moths/manifest.json").read_text())
    assert manifest["source"] == {"name": "moths", "count": 30, "wing_grey": 200}
    losses = (tmp_path / "runs/moths/losses.csv").read_text().split()
    assert [row.partition(",")[0] for row in losses] == ["1", "2", "3"]
    assert (tmp_path / "runs/moths/tensorboard").is_dir()
    (sidecar,) = tmp_path.glob("moth*.json")
    assert json.loads(sidecar.read_text())["sampler"] == "jumps"
