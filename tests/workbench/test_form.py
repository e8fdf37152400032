"""Forms from the typed settings: the command line's own rules, faults in their place."""

import pytest

from dfm_nb import config as cfg
from tests.frames import black
from workbench.form import ConfigForm, PrepareForm

ALL = sorted({key.rpartition(".")[0] or key for key in cfg.FIELDS})


def test_untouched_form_changes_nothing():
    for recipe in cfg.recipes():
        form = ConfigForm(ALL, recipe=recipe)
        assert form.overrides() == [] and not form.faults and len(form.controls) == len(cfg.FIELDS)
    assert all(c.widget.get_state()["description"] for c in form.controls.values()), "a page's tooltips need them"


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
    assert not form.faults
    assert len(form.overrides()) == len(values)
    resolved = cfg.resolve("demo", overrides=form.overrides())
    assert {k: resolved.get(k) for k in values} == values
    assert "choices" not in cfg.FIELDS["model.size"].limits, "the form's own list is not the setting's"


def test_fault_stands_beside_its_control_and_goes_away():
    form = ConfigForm(["train", "optimizer"], recipe="demo")
    form["train.train_iters"] = 0
    control = form.controls["train.train_iters"]
    assert form.faults and "got 0" in control.fault.value and 'role="alert"' in control.fault.value
    assert form.controls["optimizer.lr"].fault.value == ""
    with pytest.raises(cfg.ConfigError, match="train.train_iters"):
        form.check()
    assert "10000" not in control.fault.value, "the button beside it names the recipe's 1600"
    form["train.train_iters"] = 10
    assert not form.faults and control.fault.value == "" and form.check() is form
    assert form._sections["optimizer"].display == "none"
    form["optimizer.lr"] = -1
    assert form._sections["optimizer"].display == "", "a section with a fault opens"


def test_fault_between_two_keys_shows_where_the_form_can():
    form = ConfigForm(["model.hidden_size"], recipe="demo")
    form["model.hidden_size"] = 202
    assert "model.num_attention_heads" in form.controls["model.hidden_size"].fault.value


def test_faults_of_the_layout_and_of_hidden_keys_are_shown_in_message():
    assert "optimizer.lr" in ConfigForm(["train"], {"optimizer.lr": -1.0})._message.value
    form = ConfigForm(["model"], {"model.tensor_model_parallel_size": 3}, recipe="demo", nproc=2)
    assert form.faults and "number of processes = 2" in form._message.value
    form["model.tensor_model_parallel_size"] = 2
    assert not form.faults and form._message.value == ""


def test_prepare_argv_is_what_the_command_takes():
    from dfm_nb import prepare

    form = PrepareForm("out", {"source": "synthetic:square", "limit": 7, "resume": True, "num_images": 3})
    args = prepare.PrepareConfig.parse(form.argv())
    assert (args.source, args.limit, args.resume, args.options) == ("synthetic:square", 7, True, {"num_images": 3})
    assert form.values()["num_images"] == 3 and "image_column" not in form.values()


def test_prepare_fault_is_the_commands_own_and_stands_beside_its_control():
    form = PrepareForm("out", {"limit": 7})
    limit = form.controls["limit"]
    limit.widget.value = "0"
    assert list(form.faults) == ["limit"] and "--" not in form.faults["limit"] and "0" in limit.fault.value
    limit.widget.value = "many"
    assert "'many'" in form.faults["limit"]
    limit.widget.value = "5"
    assert not form.faults and limit.fault.value == ""
    form["source"] = "folder"
    assert list(form.faults) == ["file_or_folder"], "what is missing, not what is chosen"


def test_choosing_a_source_clears_the_others_flags(tmp_path):
    from dfm_nb.base import video

    video.write_png(tmp_path / "moth.png", black(32, 32))
    form = PrepareForm("out", {"source": "synthetic", "num_images": 20, "num_clips": 4})
    shown = {name for name, control in form.controls.items() if control.box.layout.display != "none"}
    assert {"num_images", "num_clips"} <= shown and "clip_frames" not in shown
    assert form.controls["tokenizer"].value == "residual"
    form["source"] = "folder"
    form["file_or_folder"] = str(tmp_path)
    assert not form.faults and form.argv() == ["--output-dir=out", f"--source=folder:{tmp_path}"]
    assert form.controls["tokenizer"].value == "general"
    shown = {name for name, control in form.controls.items() if control.box.layout.display != "none"}
    assert "num_images" not in shown and "clip_frames" in shown
    assert form.python() == f"prepare_dataset(output_dir='out', source='folder:{tmp_path}')"
    form["source"] = "synthetic"
    assert form.argv() == ["--output-dir=out", "--num-images=20", "--num-clips=4"]


def test_changed_value_offers_the_recipes():
    form = ConfigForm(["model", "optimizer"], {"optimizer.lr": 3e-4}, recipe="demo")
    reset = form.controls["optimizer.lr"].reset
    assert reset.layout.display == "" and reset.description == "0.001"
    reset.click()
    assert form.overrides() == [] and reset.layout.display == "none"
    form["model.num_layers"] = 3
    form["model.size"] = "DiT-B"
    assert form.controls["model.num_layers"].reset.description == "12", "of the size that is chosen"
    assert (form.controls["model.num_layers"].value, form.controls["model.hidden_size"].value) == (3, 768)


def test_command_and_call_are_there_to_copy():
    form = ConfigForm(["train.train_iters"], {"train.train_iters": 20}, recipe="demo", nproc=2, run_dir="runs/a b")
    assert form.command() == ("dfm pretrain --recipe demo --nproc-per-node 2 --run-dir 'runs/a b' train.train_iters=20")
    call = "train_model(recipe='demo', run_dir='runs/a b', num_processes=2, overrides=['train.train_iters=20'])"
    assert form.python() == call
    assert "--run-dir &#x27;runs/a b&#x27;" in form._copy.value
