"""A file can only name what is installed: nothing that is made of one imports a module, whoever reads it."""

import contextlib
import importlib
import pkgutil
import sys

import pytest

import dfm_nb
from dfm_nb import config as cfg
from dfm_nb.base import plugins
from dfm_nb.base.options import Options
from dfm_nb.base.verb import Verb
from dfm_nb.config.schema import Group
from dfm_nb.diffusion import samplers
from dfm_nb.generation.clip_files import read_clip
from tests.json_files import write_json
from tests.refusals import refused

NAME = "evil:fn"


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """A module on the path writes this file."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef fn(*given, **more): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_typed", set())
    yield tmp_path / "ran"
    sys.modules.pop("evil", None)


def models(base):
    for model in base.__subclasses__():
        yield model
        yield from models(model)


def test_no_model_imports_what_it_names(ran):
    for found in pkgutil.walk_packages(dfm_nb.__path__, "dfm_nb."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):  # of a package that is not installed
                importlib.import_module(found.name)
    seen = {model for base in (Options, Group) for model in models(base) if not issubclass(model, Verb)}
    assert {"Request", "ModelConfig"} <= {model.__name__ for model in seen}
    for model in seen:
        needed = {name: "x" for name, field in model.model_fields.items() if field.is_required()}
        for name in model.model_fields:
            for value in (NAME, [NAME], {"a": NAME}):
                with contextlib.suppress(ValueError, TypeError):
                    model(**{**needed, name: value})
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["sources", "tokenizers", "text_encoders", "networks", "samplers", "loggers"])
def test_a_name_is_imported_where_a_person_typed_it(kind, ran):
    refused(NAME, plugins.find, kind, NAME)
    assert not ran.exists()
    plugins.trust(["--any", f"key={NAME}"])
    assert plugins.find(kind, NAME) and ran.exists()


def test_a_verb_trusts_what_names_a_plug_in_alone(ran):
    """As arguments of a manifest are given to one."""
    Prepare = {model.__name__: model for model in models(Verb)}["PrepareConfig"]
    Prepare(output_dir="a", source="folder:a", caption_column=NAME, fit="crop", options={"image_column": NAME})
    assert plugins.is_foreign(NAME)
    Prepare(output_dir="a", source=NAME)
    assert not plugins.is_foreign(NAME)


def test_settings_that_others_stored_import_nothing(ran, tmp_path):
    write_json(tmp_path / "a.png.json", {"prompt": "x", "sampler": NAME})
    (tmp_path / "config.yaml").write_text(f"generation:\n  sampler: {NAME}\n")
    for read in (
        lambda: read_clip(tmp_path / "a.png"),
        lambda: samplers.find(cfg.from_yaml(tmp_path / "config.yaml").config.generation.sampler),
        lambda: plugins.load_saved("tokenizers", NAME, None),
        lambda: cfg.networks.find(NAME),
    ):
        with pytest.raises(ValueError):
            read()
    assert not ran.exists()
