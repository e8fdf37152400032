"""An outside package's plugin is found by name; the names of this package stay its own, and a mistake is named."""

import sys
from pathlib import Path

import pytest

from dfm_nb.base import plugins
from tests.installed import install
from tests.refusals import refused

MOTHS = """
import numpy as np
from dfm_nb.base.options import Options, option
from dfm_nb.base.records import Clip, Source

class Flags(Options):
    wing_grey: int | None = option(None, "moths: how bright")


class Moths(Source):
    def __init__(self, grey): self.grey = grey
    def __len__(self): return 8
    def item_key(self, index): return f"moth-{index}"
    def identity(self): return {"name": "moths", "wing_grey": self.grey}

    def read(self, index):
        yield Clip(self.item_key(index), np.full((1, 32, 32, 3), self.grey + index, np.uint8), "a moth", 8.0, "moths")


def build(spec=None, wing_grey=100):
    return Moths(wing_grey)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module on the path, which nobody installed."""
    (tmp_path / "my_moths.py").write_text(MOTHS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_typed", {"my_moths:build", "my_moths:none", "no_module:build", "my_moths:np"})
    yield
    sys.modules.pop("my_moths", None)


@pytest.fixture
def moths(tmp_path, monkeypatch):
    """A package that pip has installed, by what it leaves on the path."""
    (tmp_path / "their_moths.py").write_text(MOTHS)
    install(tmp_path, "their_moths", "[dfm_nb.sources]\nmoths = their_moths\nfolder = their_moths\n")
    monkeypatch.syspath_prepend(tmp_path)
    for cached in (plugins._found, plugins._joined):
        cached.cache_clear()
    yield
    for cached in (plugins._found, plugins._joined):
        cached.cache_clear()


def test_no_package_replaces_a_plugin_of_this_one(moths):
    assert plugins.load("sources", "folder").__name__ == "dfm_nb.data.sources.folder"
    assert plugins.load("sources", "moths").__name__ == "their_moths"


@pytest.mark.parametrize("name", ["their_moths", "moth", "os", "../moths"])
def test_a_module_that_is_no_plugin_is_not_imported(moths, name):
    refused(rf"no '{name}' .*moths", plugins.load, "sources", name)


def test_a_user_may_name_a_function_of_a_module(mine):
    assert plugins.source_and_spec("my_moths:build") == ("my_moths:build", "")
    assert plugins.source_and_spec("my_moths:build:a:b") == ("my_moths:build", "a:b")
    assert plugins.source_and_spec("folder:build:x") == ("folder", "build:x")
    assert plugins.load("sources", "my_moths:build").build().identity()["name"] == "moths"


@pytest.mark.parametrize("name", ["my_moths:none", "no_module:build", "my_moths:np"])
def test_a_module_that_lacks_the_name_is_said(mine, name):
    refused(name, plugins.load, "sources", name)


def test_a_carried_file_of_a_module_is_not_read(mine, monkeypatch, tmp_path):
    monkeypatch.setattr(plugins, "_typed", set())
    (tmp_path / "tokenizer.safetensors").touch()
    refused("--tokenizer-path my_moths:build", plugins.carried, "my_moths:build", tmp_path)
    assert "my_moths" not in sys.modules
    assert plugins.load_saved("sources", "any", "my_moths:build")[0].build() and "my_moths" in sys.modules


@pytest.mark.parametrize(
    "kind, build, name",
    [
        ("sources.moths", lambda spec=None: None, "wing_grey"),
        ("tokenizers.residual", lambda path: None, "device"),
        ("text_encoders.minilm", lambda path, device: None, "max_tokens"),
        ("text_encoders.minilm", lambda path, size, **options: None, "size"),
    ],
)
def test_a_parameter_that_a_build_lacks_is_named(moths, monkeypatch, kind, build, name):
    kind, plugin = kind.split(".")
    monkeypatch.setattr(plugins.load(kind, plugin), "build", build)
    refused(f"{plugin} .*{name}", plugins.load, kind, plugin)
    assert plugin in plugins.load_all(kind), "the others can be used"


@pytest.mark.parametrize("kind", plugins.PASSED)
def test_every_file_of_a_kind_is_listed(kind):
    modules = Path(plugins.__file__).parents[1].glob(f"data/{kind}/[a-z]*.py")
    assert {p.stem for p in modules} <= set(plugins.names(kind))
