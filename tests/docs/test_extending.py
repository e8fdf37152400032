"""docs/extending.md: its package is installed in a folder, by what pip would leave there, and its commands run."""

import re
import tomllib

import pytest

from tests.docs.docs_pages import Page, desk
from tests.installed import install
from tests.json_files import read_json

PAGE = Page("docs/extending.md")


@pytest.mark.slow
def test_the_package_of_the_page_is_found_and_used(tmp_path):
    toml, commands = ("\n".join(c for kind, c in PAGE.fences if kind == name) for name in ("toml", "bash"))
    modules = re.findall(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", PAGE.text, re.M | re.S)
    place = tmp_path / "site"
    place.mkdir()
    for name, code in modules:
        (place / name).write_text(code)
    groups = tomllib.loads(toml)["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    install(place, "moths", "\n".join(lines))
    # the server of forks has read the entry points without the package
    anew = "[sys.modules.pop(name) for name in list(sys.modules) if re.match('dfm_nb(?!.parallel)', name)]"
    dfm = f"import re, sys; sys.path.insert(1, '{place}'); {anew}; from dfm_nb.cli import entry; entry()"
    here = desk(tmp_path)
    here.tool("dfm", f"""#!/bin/sh\nexec python -c "{dfm}" "$@"\n""")
    here.run("bash", commands)
    manifest = read_json(tmp_path / "data/moths/manifest.json")
    assert manifest["source"] == {"name": "moths", "count": 30, "wing_grey": 200}
    losses = (tmp_path / "runs/moths/losses.csv").read_text().split()
    assert [row.partition(",")[0] for row in losses] == ["1", "2", "3"]
    assert (tmp_path / "runs/moths/tensorboard").is_dir()
    assert read_json(tmp_path / "moth.png.json")["sampler"] == "jumps"
    assert (tmp_path / "parallel.png").is_file()
