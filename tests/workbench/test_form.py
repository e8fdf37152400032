"""Forms from the typed settings: the right control for a type, the command line's own rules, faults in their place."""

from __future__ import annotations

import ipywidgets as w
import numpy as np
import pytest

from dfm_nb import config as cfg
from dfm_nb.base import plugins
from dfm_nb.config import sizes
from workbench.form import ConfigForm, PrepareForm

ALL = sorted({key.rpartition(".")[0] or key for key in cfg.fields()})


def test_untouched_form_changes_nothing():
    for recipe in cfg.recipes():
        form = ConfigForm(ALL, recipe=recipe)
        assert form.overrides() == [] and form.valid and len(form.controls) == len(cfg.fields())


def test_every_control_has_its_help_and_limits():
    form = ConfigForm(ALL)
    for key, field in cfg.fields().items():
        control = form.controls[key]
        assert control.widget.description == key.rpartition(".")[2]
        assert control.widget.tooltip.startswith(field.help) and field.type_name in control.widget.tooltip


@pytest.mark.parametrize(
    "key, kind",
    [
        ("train.caption_dropout", w.FloatSlider),
        ("train.train_iters", w.Text),
        ("model.size", w.Dropdown),
        ("model.attention_backend", w.Dropdown),
        ("model.qk_layernorm", w.Checkbox),
        ("validation.prompts", w.Text),
        ("optimizer.lr", w.Text),
        ("mixed_precision", w.Dropdown),
        ("dataset.path", w.Text),
    ],
)
def test_control_fits_the_type(key, kind):
    assert type(ConfigForm([key]).controls[key].widget) is kind


def test_menus_hold_the_legal_values():
    form = ConfigForm(["model", "mixed_precision"])
    assert [v for _, v in form.controls["model.size"].widget.options] == [None, *sizes.SIZES]
    assert [v for _, v in form.controls["mixed_precision"].widget.options] == ["fp32", "bf16"]


def test_overrides_round_trip_through_the_resolver():
    form = ConfigForm(ALL, recipe="demo")
    values = {
        "train.train_iters": 40,
        "optimizer.lr": 3e-4,
        "model.qk_layernorm": False,
        "train.caption_dropout": 0.25,
        "validation.prompts": ["a blue, small one", "x: y"],
        "dataset.mock_latent_sizes": [[1, 4, 4]],
        "dataset.path": "data/with space",
        "checkpoint.keep_every": 50,
        "model.attention_backend": "sdpa",
    }
    for key, value in values.items():
        form[key] = value
    assert form.valid, form.faults
    assert len(form.overrides()) == len(values)
    resolved = cfg.resolve("demo", overrides=form.overrides())
    assert {k: resolved.get(k) for k in values} == values


def test_default_that_is_set_can_be_cleared():
    form = ConfigForm(["checkpoint"], {"checkpoint.keep_every": 5})
    assert form.overrides() == ["checkpoint.keep_every=5"]
    form.controls["checkpoint.keep_every"].widget.value = ""
    assert form.overrides() == []


def test_size_shows_its_numbers_and_is_one_override():
    form = ConfigForm(["model"], recipe="demo")
    form["model.size"] = "DiT-B"
    assert form.controls["model.hidden_size"].value == 768
    assert form.overrides() == ["model.size=DiT-B"]
    form["model.num_layers"] = 3
    assert form.overrides() == ["model.size=DiT-B", "model.num_layers=3"]
    resolved = cfg.resolve("demo", overrides=form.overrides())
    assert (resolved.config.model.num_layers, resolved.config.model.hidden_size) == (3, 768)


def test_fault_stands_beside_its_control_and_goes_away():
    form = ConfigForm(["train", "optimizer"], recipe="demo")
    form["train.train_iters"] = 0
    control = form.controls["train.train_iters"]
    assert not form.valid and "must be greater than or equal to 1; got 0; the default is" in control.fault
    assert 'role="alert"' in control._fault.value and form.controls["optimizer.lr"].fault == ""
    assert "1 to correct" in form._summary.value
    with pytest.raises(cfg.ConfigError, match="train.train_iters must be greater than or equal to 1"):
        form.check()
    form["train.train_iters"] = 10
    assert form.valid and control.fault == "" and control._fault.value == "" and form.check() is form


def test_fault_of_the_wrong_type_is_told_in_words():
    form = ConfigForm(["optimizer.lr"])
    form.controls["optimizer.lr"].widget.value = "fast"
    assert "must be a valid number; got 'fast'" in form.controls["optimizer.lr"].fault
    form.controls["optimizer.lr"].widget.value = "3e-4"
    assert form.overrides() == ["optimizer.lr=0.0003"]


def test_fault_between_two_keys_shows_where_the_form_can():
    form = ConfigForm(["model.hidden_size"], recipe="demo")
    form["model.hidden_size"] = 202
    assert "model.num_attention_heads must divide model.hidden_size = 202" in form.controls["model.hidden_size"].fault


def test_fault_of_a_hidden_key_is_shown_in_general():
    form = ConfigForm(["train"], {"optimizer.lr": -1.0})
    assert "optimizer.lr must be greater than 0" in form._general.value
    assert form.overrides() == ["optimizer.lr=-1.0"]


def test_layout_is_checked_for_the_processes():
    form = ConfigForm(["model"], {"model.tensor_model_parallel_size": 3}, recipe="demo", nproc=2)
    assert not form.valid and "must divide the number of processes = 2; got 3 * 1 * 1 = 3" in form._general.value
    form["model.tensor_model_parallel_size"] = 2
    assert form.valid and form._general.value == ""


def test_form_says_each_fault_once():
    form = ConfigForm(["model"], recipe="demo", nproc=1)
    form["model.sequence_parallel"] = True
    form["model.virtual_pipeline_model_parallel_size"] = 2
    assert len(form.faults) == 2
    for key in ("model.sequence_parallel", "model.virtual_pipeline_model_parallel_size"):
        assert form.controls[key].fault.count("needs model.") == 1


def test_unknown_group_or_default_names_the_legal_ones():
    with pytest.raises(ValueError, match="'trian' is no group and no setting; groups are .*train"):
        ConfigForm(["trian"])
    with pytest.raises(ValueError, match="'train.iters' is not a setting"):
        ConfigForm(["train"], {"train.iters": 5})


def test_prepare_menus_are_the_plugin_files():
    form = PrepareForm("out")
    for name, kind in PrepareForm.MENUS.items():
        assert [v for _, v in form.controls[name].widget.options] == plugins.names(kind)
    assert form.argv() == ["--output-dir", "out"] and form.valid


def test_prepare_argv_is_what_the_command_takes():
    from dfm_nb import prepare

    form = PrepareForm("out", {"source": "synthetic:square", "limit": 7, "resume": True, "num_images": 3})
    args = prepare.parse(form.argv())
    assert (args.source, args.limit, args.resume, args.options) == ("synthetic:square", 7, True, {"num_images": 3})
    assert form.values()["num_images"] == 3 and "image_column" not in form.values()


def test_prepare_fault_is_the_commands_own_and_stands_beside_its_control():
    form = PrepareForm("out", {"limit": 7})
    limit = form.controls["limit"]
    limit.widget.value = "0"
    assert form.fault == limit.fault == "--limit must be at least 1; got 0" and 'role="alert"' in limit._fault.value
    with pytest.raises(ValueError, match="--limit must be at least 1"):
        form.check()
    limit.widget.value = "many"
    assert limit.fault == "--limit must be a whole number; got 'many'"
    limit.widget.value = "5"
    assert form.valid and limit.fault == "" and form.check() is form


@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({"source": "folder"}, "source_spec"),
        ({"source": "folder", "source_spec": "/nowhere"}, "source_spec"),
        ({"source": "table", "source_spec": "none.csv"}, "source_spec"),
        ({"short_side": 63}, "short_side"),
        ({"num_images": -1}, "num_images"),
        ({"val_fraction": 2}, "val_fraction"),
    ],
)
def test_prepare_says_before_a_launch_what_the_source_would(settings, at):
    form = PrepareForm("out")
    for key, value in settings.items():
        form[key] = value
    assert [key for key, control in form.controls.items() if control.fault] == [at] and form._message.value == ""


def test_choosing_a_source_clears_the_others_flags(tmp_path):
    from dfm_nb.base import video

    video.write_png(tmp_path / "moth.png", np.zeros((32, 32, 3), np.uint8))
    form = PrepareForm("out", {"source": "synthetic", "num_images": 20, "num_clips": 4})
    shown = {name for name, control in form.controls.items() if control.box.layout.display != "none"}
    assert {"num_images", "num_clips"} <= shown and "clip_frames" not in shown
    form["source"] = "folder"
    form["source_spec"] = str(tmp_path)
    assert form.valid and form.argv() == ["--output-dir", "out", "--source", f"folder:{tmp_path}"]
    shown = {name for name, control in form.controls.items() if control.box.layout.display != "none"}
    assert "num_images" not in shown and "clip_frames" in shown
    assert form.python() == f"prepare_dataset(source='folder:{tmp_path}', output_dir='out')"
    form["source"] = "synthetic"
    assert form.argv() == ["--output-dir", "out", "--num-images", "20", "--num-clips", "4"]


@pytest.mark.parametrize(
    ("key", "typed", "said"),
    [
        ("train.train_iters", "12.7", "must be a valid integer; got 12.7"),
        ("train.train_iters", "", "must be a valid integer; got null"),
        ("optimizer.lr", "1e99", "must be less than 1; got 1e+99"),
    ],
)
def test_number_that_cannot_be_meant_is_a_fault(key, typed, said):
    form = ConfigForm(["train", "optimizer"], recipe="demo")
    form.controls[key].widget.value = typed
    assert said in form.controls[key].fault


def test_closed_section_is_marked_with_its_faults_and_changes():
    form = ConfigForm(["model", "train", "optimizer"], recipe="demo")
    form.widget  # noqa: B018
    titles = lambda: [section.titles[0] for section in form._sections.values()]  # noqa: E731
    assert titles() == ["model", "train", "optimizer"]
    form["optimizer.lr"] = -1
    form["train.train_iters"] = 20
    assert titles() == ["model", "train · 1 changed", "optimizer · ✖ 1 to correct · 1 changed"]


def test_changed_value_offers_the_recipes():
    form = ConfigForm(["model", "optimizer"], {"optimizer.lr": 3e-4}, recipe="demo")
    reset = form.controls["optimizer.lr"].reset
    assert reset.layout.display == "" and reset.description == "0.001"
    reset.click()
    assert form.overrides() == [] and reset.layout.display == "none"
    form["model.num_layers"] = 3
    form["model.size"] = "DiT-B"
    assert form.controls["model.num_layers"].reset.description == "12", "of the size that is chosen"
    form.controls["model.num_layers"].reset.click()
    form["model.size"] = "DiT-L"
    assert form.controls["model.num_layers"].value == 24 and form.overrides() == ["model.size=DiT-L"]


def test_form_tells_parameters_memory_and_time(monkeypatch):
    from workbench import form as module

    monkeypatch.setattr(module, "cpu_flops", lambda bf16: 1e9)
    monkeypatch.setattr(module, "_RATES", {})
    form = ConfigForm(["model.size", "train.train_iters"], recipe="demo", nproc=2)
    assert "4.1 M parameters, 0.15 GiB a process" in form._summary.value and "at least" not in form._summary.value
    form._measure()
    assert "at least" in form._summary.value
    form["model.size"] = "DiT-7B"
    assert "7,9" in form._summary.value and "GiB a process (this machine has" in form._summary.value


def test_command_and_call_are_there_to_copy():
    form = ConfigForm(["train.train_iters"], {"train.train_iters": 20}, recipe="demo", nproc=2, run_dir="runs/a b")
    assert form.command() == ("dfm pretrain --recipe demo --nproc-per-node 2 --run-dir 'runs/a b' train.train_iters=20")
    call = "train_model(recipe='demo', run_dir='runs/a b', num_processes=2, overrides=['train.train_iters=20'])"
    assert form.python() == call
    assert form._copy.value.count("<button") == 2 and "--run-dir &#x27;runs/a b&#x27;" in form._copy.value
