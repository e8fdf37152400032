"""The three layers, and every fault a user can make in them."""

import dataclasses
import difflib
import pickle
import re
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dfm_nb import config as C
from dfm_nb.config import notation, sizes
from dfm_nb.config.checks import layout_faults

REFERENCE = Path(__file__).parent / "dit_pretrain.yaml"


def write(folder, text, name="my.yaml"):
    path = folder / name
    path.write_text(text)
    return path


# ---- layers


def test_resolve_later_layers_win(tmp_path):
    file = write(tmp_path, "train:\n  train_iters: 77\n  eval_iters: 3\n")
    r = C.resolve("demo", file, ["train.train_iters=99"])
    assert r.config.train.train_iters == 99 and r.provenance["train.train_iters"] == "command line"
    assert r.config.train.eval_iters == 3 and r.provenance["train.eval_iters"] == str(file)
    assert r.provenance["optimizer.lr"] == "recipe demo"
    assert r.config.rng.seed == 1234 and r.provenance["rng.seed"] == "default"


def test_resolve_accepts_the_reference_example(tmp_path):
    """The override file of the reference's documentation, key for key."""
    file = write(
        tmp_path,
        """
model:
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  context_parallel_size: 1
train:
  global_batch_size: 64
  micro_batch_size: 2
  train_iters: 10000
optimizer:
  lr: 0.0001
  weight_decay: 0.01
checkpoint:
  save_interval: 500
  checkpoint_dir: /path/to/checkpoints/dit_butterfly/
""",
    )
    start = "checkpoint.load_checkpoint=/x/iter_5000/"
    overrides = ["model.tensor_model_parallel_size=3", "train.global_batch_size=128", start]
    c = C.resolve("default", file, overrides, world_size=6).config
    assert (c.model.tensor_model_parallel_size, c.train.global_batch_size, c.train.micro_batch_size) == (3, 128, 2)
    assert c.checkpoint.load_checkpoint == "/x/iter_5000/"


def test_the_reference_yaml_resolves_with_and_without_data(tmp_path):
    for asked, data in (("dataset.mock=true", (True, None)), (f"dataset.path={tmp_path}", (False, str(tmp_path)))):
        r = C.resolve("default", REFERENCE, [asked], training=True, world_size=8)
        assert (r.config.dataset.mock, r.config.dataset.path) == data
        assert r.config.checkpoint.load == r.config.checkpoint.checkpoint_dir == "dfm_experiment"
        assert (r.config.model.num_attention_heads, r.config.dataset.task_encoder_seq_length) == (16, 15360)
        told = "\n".join(r.notices)
        assert "model.qkv_format=thd" in told and "checkpoint.load_optim=true" in told and str(REFERENCE) in told
        again = C.resolve("demo", write(tmp_path, C.to_yaml(r)), training=True)  # a saved config.yaml is a layer
        assert (again.config.dataset, again.notices) == (r.config.dataset, ())


def test_mock_and_a_path_put_each_other_aside_across_layers(tmp_path):
    path, mock = write(tmp_path, "dataset: {path: /x}", "p.yaml"), write(tmp_path, "dataset: {mock: true}", "m.yaml")
    by_mock, by_path = C.resolve("demo", path, ["dataset.mock=true"]), C.resolve("demo", mock, ["dataset.path=/y"])
    assert (by_mock.config.dataset.mock, by_mock.config.dataset.path) == (True, None)
    assert by_mock.notices == (f"dataset.mock (command line) puts aside dataset.path=/x ({path})",)
    assert (by_path.config.dataset.mock, by_path.config.dataset.path) == (False, "/y")
    assert by_path.provenance["dataset.mock"] == "derived: dataset.path"
    assert C.resolve("demo", path, ["dataset.mock=false"]).config.dataset.path == "/x"
    assert C.resolve("demo", mock, ["dataset.path=null"]).config.dataset.mock


def test_a_named_checkpoint_puts_aside_the_folder_of_a_lower_layer():
    r = C.resolve("default", REFERENCE, ["dataset.mock=true", "checkpoint.load_checkpoint=a"])
    assert (r.config.checkpoint.load, r.config.checkpoint.load_checkpoint) == (None, "a")


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("optimizer.lr=1e-4", "optimizer.lr", 1e-4),
        ("train.train_iters=1e3", "train.train_iters", 1000),
        ("model.adaln_lora_dim=null", "model.adaln_lora_dim", None),
        ("model.sequence_parallel=false", "model.sequence_parallel", False),
        ("checkpoint.save=/a b/c=d", "checkpoint.checkpoint_dir", "/a b/c=d"),
        ("ema.sigma_rels=[0.05]", "ema.sigma_rels", [0.05]),
        ("ema.sigma_rels=[]", "ema.sigma_rels", []),
        ('validation.prompts=["a red moth, resting", blue]', "validation.prompts", ["a red moth, resting", "blue"]),
        ("dataset.mock_latent_sizes=[[1,4,4],[2,4,6]]", "dataset.mock_latent_sizes", [[1, 4, 4], [2, 4, 6]]),
        ("mixed_precision=bf16_mixed", "mixed_precision", "bf16"),
        ("train.log_interval=5", "logger.log_interval", 5),
        ("dataset.seq_length=4096", "dataset.task_encoder_seq_length", 4096),
    ],
)
def test_resolve_reads_values_as_yaml(override, key, value):
    got = C.resolve(None, overrides=[override]).get(key)
    assert got == value and type(got) is type(value)


def test_resolve_does_not_share_lists_between_runs():
    C.resolve(None).config.validation.prompts.append("x")
    assert C.resolve(None).config.validation.prompts == []


def test_resolve_takes_an_empty_file_and_empty_groups(tmp_path):
    assert C.resolve("demo", write(tmp_path, "")).config == C.resolve("demo").config
    assert C.resolve("demo", write(tmp_path, "model:\ntrain: {}\n")).config == C.resolve("demo").config


@pytest.mark.parametrize("name", C.recipes())
def test_every_recipe_resolves(name):
    overrides = ["dataset.mock=true", *(["checkpoint.pretrained=butterflies"] if name.startswith("finetune") else [])]
    assert C.resolve(name, overrides=overrides, training=True, world_size=1)
    if name.startswith("finetune"):
        with pytest.raises(C.ConfigError, match="give checkpoint.pretrained=PATH"):
            C.resolve(name, overrides=["dataset.mock=true"], training=True, world_size=1)


# ---- sizes and derived values


def test_size_sets_shape_below_the_settings_of_its_own_layer(tmp_path):
    file = write(tmp_path, "model:\n  size: dit-xl\n  num_layers: 4\n")
    r = C.resolve("demo", file)
    assert (r.config.model.size, r.config.model.num_layers, r.config.model.hidden_size) == ("DiT-XL", 4, 1152)
    assert r.provenance["model.hidden_size"] == f"size DiT-XL ({file})"
    assert C.resolve("demo", file, ["model.size=DiT-B"]).config.model.num_layers == 12  # a later layer wins


def test_ffn_follows_the_width_unless_it_is_set():
    assert C.resolve("demo", overrides=["model.hidden_size=240"]).config.model.ffn_hidden_size == 960
    assert C.resolve("demo", overrides=["model.ffn_hidden_size=100"]).config.model.ffn_hidden_size == 100


def test_saved_config_is_a_layer_whose_derived_values_are_derived_again(tmp_path):
    saved = C.resolve("demo", overrides=["train.train_iters=300"])
    assert saved.config.scheduler.lr_decay_iters == 300
    file = write(tmp_path, C.to_yaml(saved))
    again = C.resolve("default", file, ["model.hidden_size=384", "train.train_iters=500"])
    assert again.config.model.ffn_hidden_size == 1536
    assert again.config.scheduler.lr_decay_iters == 500
    assert again.config.model.num_layers == saved.config.model.num_layers


def test_short_runs_need_no_warmup_of_their_own():
    for iters, warmup in ((1, 0), (50, 5), (10_000, 100)):
        scheduler = C.resolve("default", overrides=[f"train.train_iters={iters}"]).config.scheduler
        assert (scheduler.lr_warmup_iters, scheduler.lr_decay_iters) == (warmup, iters)


def test_with_derived_fills_nulls_only():
    r = C.resolve(None, overrides=["model.in_channels=8"])
    filled = r.with_derived({"model.in_channels": 16, "model.text_dim": 7}, "the data set")
    assert (filled.config.model.in_channels, filled.config.model.text_dim) == (8, 7)
    assert filled.provenance["model.text_dim"] == "derived: the data set"
    assert r.config.model.text_dim is None
    with pytest.raises(C.ConfigError, match=r"the data set: model.text_dim must be greater than or equal to 1; got -1"):
        r.with_derived({"model.text_dim": -1}, "the data set")


def test_to_yaml_and_from_yaml_are_inverse(tmp_path):
    r = C.resolve("demo", overrides=["validation.prompts=[a, 'b: c', '1e4']", "checkpoint.save='2026-01-01'"])
    r = r.with_derived({"train.exit_duration_s": 0.5123456789012345, "model.text_dim": 7}, "the data set")
    assert C.from_yaml(write(tmp_path, C.to_yaml(r))) == r


# ---- faults: (overrides, what the message must hold)

FAULTS = {
    "unknown key, nearest by spelling": (
        ["model.hiden_size=3"],
        r"model.hiden_size is not a key.*did you mean model.hidden_size",
    ),
    "unknown key, nearest by name": (["lr=1"], r"lr is not a key.*did you mean optimizer.lr"),
    "key in the wrong group": (["train.lr=1"], r"train.lr is not a key.*did you mean optimizer.lr"),
    "slips in group and name": (["trian.train_itr=1"], r"train_itr is not a key.*did you mean train.train_iters\?"),
    "unknown group": (["foo.bar=1"], r"foo.bar is not a key.*groups: checkpoint, dataset"),
    "other value of an implied key": (
        ["model.qkv_format=sbhd"],
        r"qkv_format must be thd or left out; got 'sbhd'; sequences are always packed",
    ),
    "other truth of an implied key": (
        ["checkpoint.load_optim=false"],
        r"load_optim must be true or left out; got False; checkpoint.pretrained=PATH starts from weights alone",
    ),
    "no equals sign": (["train.train_iters"], r"must be group.key=value; got 'train.train_iters'"),
    "group as a key": (["model=3"], r"model is a group of keys"),
    "mapping under a key": (["model.hidden_size.x=3"], r"model.hidden_size must be a valid integer|is not a key"),
    "text for a whole number": (
        ["train.train_iters=abc"],
        r"train.train_iters must be a valid integer; got 'abc'; the default is 10000",
    ),
    "fraction for a whole number": (["model.num_layers=2.5"], r"model.num_layers must be a valid integer; got 2.5"),
    "truth value for a whole number": (["model.num_layers=true"], r"must be a valid integer; got True"),
    "number for a truth value": (["train.exit_on_signal=3"], r"train.exit_on_signal must be a valid boolean; got 3"),
    "null where there must be a value": (
        ["dataset.num_workers=null"],
        r"must be a valid integer; got null; the default is 2",
    ),
    "text for a list": (["validation.prompts=a moth"], r"must be a valid list; got 'a moth'; the default is \[\]"),
    "list for a text": (["dataset.path=[a]"], r"dataset.path must be a valid string; got \['a'\]"),
    "wrong inner length": (["dataset.mock_latent_sizes=[[1,2]]"], r"entry 1 must have at least 3 items"),
    "empty list": (["dataset.mock_latent_sizes=[]"], r"must have at least 1 item"),
    "below its limit": (
        ["model.num_layers=0"],
        r"model.num_layers must be greater than or equal to 1; got 0; the default is 12",
    ),
    "above its limit": (["train.caption_dropout=1.5"], r"must be less than or equal to 1; got 1.5"),
    "open limit": (["optimizer.adam_beta1=1"], r"adam_beta1 must be less than 1"),
    "negative rate": (["optimizer.lr=-1"], r"optimizer.lr must be greater than 0; got -1;"),
    "not finite": (["optimizer.lr=.nan"], r"optimizer.lr must be a finite number"),
    "entry out of range": (["ema.sigma_rels=[0.05,0.5]"], r"ema.sigma_rels entry 2 must be less than 0.2886"),
    "repeated entry": (["ema.sigma_rels=[0.1,0.1]"], r"entries must differ"),
    "not among the choices": (["mixed_precision=fp16"], r"must be 'fp32' or 'bf16'; got 'fp16'; did you mean"),
    "unknown size": (["model.size=DiT-XLL"], r"model.size must be one of tiny.*did you mean DiT-XL"),
    "not a multiple": (["validation.height=100"], r"must be a multiple of 16; got 100"),
    "frames": (["validation.frames=10"], r"must be 1 \+ 4 k; got 10; nearest: 9 or 13"),
    "two names of one key": (
        ["checkpoint.save=a", "checkpoint.checkpoint_dir=b"],
        r"is the same key as checkpoint.save",
    ),
    "heads against width": (
        ["model.num_attention_heads=7"],
        r"must divide model.hidden_size = 384 into .*; got 7; heads 4, 6, 8, or",
    ),
    "odd head": (
        ["model.hidden_size=30", "model.num_attention_heads=6"],
        r"= 30 into an even number of channels per head; got 6; heads 1, 3, 5, or hidden_size 24 or 36",
    ),
    "minimum rate above the rate": (["optimizer.min_lr=1"], r"min_lr must be at most optimizer.lr = 0.0001"),
    "warm-up beyond the run": (
        ["train.train_iters=50", "scheduler.lr_warmup_iters=60"],
        r"lr_warmup_iters must be less than the 50 iterations",
    ),
    "virtual stages without a pipeline": (
        ["model.virtual_pipeline_model_parallel_size=2"],
        r"needs model.pipeline_model_parallel_size > 1",
    ),
    "sequence parallel without TP": (["model.sequence_parallel=true"], r"needs model.tensor_model_parallel_size > 1"),
    "global against micro batch": (
        ["train.micro_batch_size=5"],
        r"multiple of train.micro_batch_size = 5; got 32; nearest: 30 or 35",
    ),
    "mock and a path": (["dataset.mock=true", "dataset.path=/x"], r"dataset.mock excludes dataset.path"),
    "pretrained and resume": (["checkpoint.pretrained=a", "checkpoint.load_checkpoint=b"], r"pretrained excludes"),
    "two places to resume from": (
        ["checkpoint.load=a", "checkpoint.load_checkpoint=b"],
        r"load_checkpoint excludes checkpoint.load",
    ),
    "first frame given in tokens of two frames": (
        ["model.patch_temporal=2", "dataset.condition_frames_prob=0.5"],
        r"condition_frames_prob must be 0 with model.patch_temporal = 2.*; got 0.5; set it to 0, or",
    ),
    "missing value": (["dataset.path=???"], r"dataset.path must be the value itself"),
    "unknown interpolation": (
        ["dataset.path=${nope}"],
        r"dataset.path must be the value itself: .*not filled in; got .*nope",
    ),
    "broken YAML": (["validation.prompts=[a"], r"validation.prompts must be a YAML value"),
}


@pytest.mark.parametrize("overrides, message", FAULTS.values(), ids=FAULTS)
def test_fault_is_named_with_its_fix(overrides, message):
    with pytest.raises(C.ConfigError, match=message) as caught:
        C.resolve("default", overrides=overrides)
    assert len(caught.value.faults) == 1
    assert "command line" in str(caught.value)


def test_all_faults_are_reported_at_once():
    single = [o for name, (o, _) in FAULTS.items() if len(o) == 1 and name not in ("group as a key", "broken YAML")]
    chosen = [o for (o,) in single][:8] + ["optimizer.weight_decay=-1", "rng.seed=-1", "model.num_attention_heads=7"]
    with pytest.raises(C.ConfigError) as caught:
        C.resolve("default", overrides=chosen, training=True)
    text = str(caught.value)
    assert len(caught.value.faults) == len(chosen) + 1  # and no data set
    assert text.count("\n") == len(caught.value.faults) and "dataset.path must name a folder" in text


@pytest.mark.parametrize(
    "overrides, count",
    [
        (["model.sequence_parallel=true", "model.virtual_pipeline_model_parallel_size=2"], 2),
        (["train.micro_batch_size=5"], 1),
        (["model.virtual_pipeline_model_parallel_size=5"], 1),
        (["model.tensor_model_parallel_size=5"], 2),  # it divides neither the model nor the processes
        (["train.train_iters=0"], 1),
        (["dataset.path=[a]"], 1),
    ],
)
def test_a_fault_is_reported_once(overrides, count):
    """With a number of processes the layout is checked too, and some rules belong to both."""
    mock = [] if overrides == ["dataset.path=[a]"] else ["dataset.mock=true"]
    with pytest.raises(C.ConfigError) as caught:
        C.resolve("default", overrides=[*mock, *overrides], training=True, world_size=1)
    assert len(caught.value.faults) == count, str(caught.value)


def test_faults_of_all_layers_carry_their_file(tmp_path):
    file = write(tmp_path, "model:\n  numlayers: 3\n  hidden_size: wide\ncheckpiont:\n  save: x\n")
    with pytest.raises(C.ConfigError) as caught:
        C.resolve("demo", file, ["optimizer.lr=x"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 faults in the configuration"
    assert sum(str(file) in line for line in lines) == 3 and sum("command line" in line for line in lines) == 1
    assert "did you mean model.num_layers?" in lines[1] and "did you mean checkpoint.save?" in lines[2]


@pytest.mark.parametrize(
    "text, message",
    [
        ("model: [1, 2", "must be a YAML file of groups .*expected"),
        ("model:\n  num_layers: 1\n  num_layers: 2\n", "duplicate key num_layers"),
        ("- a\n- b\n", "must be a YAML file of groups .*in it"),
        ("just words\n", "must be a YAML file of groups .*got 'just words' in it"),
        ("model: 3\n", "model is a group of keys"),
        ("a:\n  - !!python/object/apply:os.system [echo]\n", "must be a YAML file of groups .*constructor"),
    ],
)
def test_broken_file_is_one_sentence(tmp_path, text, message):
    with pytest.raises(C.ConfigError, match=message):
        C.resolve("demo", write(tmp_path, text))


def test_missing_files_and_recipes_are_named(tmp_path):
    with pytest.raises(C.ConfigError, match=r"nope.yaml: must be a YAML file .*No such file"):
        C.resolve("demo", tmp_path / "nope.yaml")
    with pytest.raises(C.ConfigError, match=r"must be a YAML file .*Is a directory"):
        C.resolve("demo", tmp_path)
    with pytest.raises(C.ConfigError, match=r"recipe must be one of .*did you mean demo\?"):
        C.resolve("dem")
    with pytest.raises(FileNotFoundError, match=r"config\.yaml"):
        C.from_yaml(tmp_path / "nope.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(C.ConfigError, match="must be a YAML file .*decode"):
        C.resolve("demo", tmp_path / "binary.yaml")


def test_training_needs_data_and_weights_that_exist(tmp_path):
    (tmp_path / "butterflies").mkdir()
    with pytest.raises(C.ConfigError) as caught:
        overrides = [f"dataset.path={tmp_path}/buterflies", "checkpoint.load_checkpoint=/none/x"]
        C.resolve("demo", overrides=overrides, training=True)
    text = str(caught.value)
    assert f"did you mean {tmp_path}/butterflies?" in text and "checkpoint.load_checkpoint must exist" in text
    assert C.resolve("demo", overrides=[f"dataset.path={tmp_path}/butterflies"], training=True)


def test_folder_to_resume_from_may_be_absent_but_a_named_checkpoint_may_not(tmp_path):
    def resolve(key, path):
        return C.resolve("demo", overrides=["dataset.mock=true", f"checkpoint.{key}={tmp_path / path}"], training=True)

    (tmp_path / "iter_0005000").mkdir()
    (tmp_path / "model.safetensors").touch()
    for key in ("load", "load_checkpoint", "pretrained"):
        assert resolve(key, "iter_0005000") and resolve(key, "iter_5000/")  # as the reference's pages write it
        with pytest.raises(C.ConfigError, match=f"checkpoint.{key} must exist; got .*iter_4000"):
            resolve(key, "iter_4000")
    assert resolve("load", "nothing/yet")
    with pytest.raises(C.ConfigError, match="load must be a folder of checkpoints; got .*; checkpoint.pretrained=FILE"):
        resolve("load", "model.safetensors")


def test_config_error_survives_a_worker_process():
    with pytest.raises(C.ConfigError) as caught:
        C.resolve(None, overrides=["rng.seed=x"])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_no_layer_takes_anything_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    file = write(tmp_path, "logger:\n  wandb_project: ${oc.env:SECRET}\n")
    for read in (lambda: C.from_yaml(file), lambda: C.resolve("demo", file)):
        with pytest.raises(C.ConfigError, match="wandb_project must be the value itself") as caught:
            read()
        assert "hunter2" not in str(caught.value)


def test_run_folder_of_an_earlier_version_is_read():
    path = Path(__file__).parents[1] / "stored" / "run" / "config.yaml"
    saved = C.from_yaml(path)
    assert (saved.config.model.sigma_data, saved.config.scheduler.lr_warmup_iters) == (0.5, 1)
    assert saved.provenance["model.text_dim"] == "derived: the data set"
    written, now = yaml.safe_load(path.read_text()), yaml.safe_load(C.to_yaml(saved))
    for group, values in written.items():  # keys that came since have their defaults
        assert values == ({k: now[group][k] for k in values} if isinstance(values, dict) else now[group])


NASTY = [
    "", "null", "true", "0", "-1", "3", "2147483647", "9" * 30, "-" + "9" * 400, "9" * 5000, "0x" + "f" * 5000,
    "1e400", "-1e400", ".inf", ".nan", "1e300", "1e-320", "0.5", "word", "'1e-4'", "???", "${oc.env:HOME}", "${a.b}",
    "2026-01-01", "1:30:00", "!!int x", "!!bool x", "!!timestamp x", "!!python/name:os.system", "[", "{a: 1}", "[]",
    "[[]]", "[[1, 2, 3]]", "[a, null, 1.5]", "[" * 9, "[" + "1," * 90 + "]", "&a [*a]", "{? [1] : 2}", "/\0x",
    "x" * 5000, "é\n  b", "&a [&b [&c [1,1],*c,*c],*b,*b]",
]  # fmt: skip


def says_one_sentence_or_settles(key, text):
    began = time.monotonic()
    try:
        C.resolve(None, overrides=[f"{key}={text}"], training=True, world_size=2)
    except C.ConfigError as error:
        assert all("\n" not in str(fault) and len(str(fault)) < 1000 for fault in error.faults), str(error)
    assert time.monotonic() - began < 5  # no value makes a rule count for ever


@pytest.mark.parametrize("text", NASTY, ids=lambda text: text[:12])
def test_any_value_for_any_key_settles_or_is_one_sentence(text):
    for key in C.fields():
        says_one_sentence_or_settles(key, text)


TEXT = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=20)  # PyYAML folds odd line ends
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(C.fields())), st.text(max_size=30) | VALUES.map(notation.write_value))
def test_random_value_for_any_key_settles_or_is_one_sentence(key, text):
    says_one_sentence_or_settles(key, text)


@pytest.mark.parametrize("text", ["[" * 3000, "[" + "1," * 5000 + "]", "- " * 3000], ids=["deep", "long", "steps"])
def test_long_and_deep_values_settle_or_are_one_sentence(text):
    says_one_sentence_or_settles("ema.sigma_rels", text)


@settings(max_examples=100, deadline=None)
@given(VALUES)
@example("\xa0")
def test_notation_reads_what_it_writes(value):
    again = notation.read(notation.write_value(value))
    assert repr(again) == repr(value)  # as text, because nan is not itself


# ---- layouts


def layout(*overrides, world):
    return [str(fault) for fault in layout_faults(C.resolve(None, overrides=list(overrides)).config, world)]


TP, PP, CP = (f"model.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))


@pytest.mark.parametrize("tp, pp, cp, world", [(1, 1, 1, 1), (2, 1, 1, 8), (2, 3, 2, 12), (3, 4, 1, 24), (6, 1, 1, 6)])
def test_layout_that_fits_has_no_faults(tp, pp, cp, world):
    assert layout(f"{TP}={tp}", f"{PP}={pp}", f"{CP}={cp}", world=world) == []


@pytest.mark.parametrize(
    "overrides, world, message",
    [
        ([f"{TP}=4"], 4, r"must divide model.num_attention_heads = 6; got 4; nearest: 2, 3, 6"),
        (
            ["model.hidden_size=60", f"{TP}=6", "model.ffn_hidden_size=100"],
            6,
            r"must divide model.ffn_hidden_size = 100",
        ),
        ([f"{PP}=5"], 5, r"must divide model.num_layers = 12; got 5; nearest: 3, 4, 6"),
        (
            [f"{PP}=2", "model.virtual_pipeline_model_parallel_size=4"],
            2,
            r"divide the 6 layers of each pipeline.*2, 3, 6",
        ),
        ([f"{CP}=3"], 3, r"multiple of CP = 3; got 1 \* 8192 = 8192; nearest: 8190 or 8193"),
        ([f"{TP}=3", "model.sequence_parallel=true"], 3, r"multiple of CP \* TP = 3"),
        ([f"{TP}=2"], 3, r"must divide the number of processes = 3; got 2 \* 1 \* 1 = 2; start 2 or 4 processes"),
        (
            ["train.global_batch_size=32"],
            3,
            r"multiple of micro_batch_size \* DP = 1 \* 3 = 3; got 32; nearest: 30 or 33",
        ),
        (
            [f"{PP}=4", "model.virtual_pipeline_model_parallel_size=3", "train.global_batch_size=6"],
            4,
            r"number of micro-batches that is a multiple of PP = 4.*nearest: 4 or 8",
        ),
    ],
)
def test_layout_fault_names_the_nearest_legal_values(overrides, world, message):
    faults = layout(*overrides, world=world)
    assert len(faults) == 1 and re.search(message, faults[0]), faults


def test_layout_faults_are_reported_at_once():
    faults = layout(f"{TP}=4", f"{PP}=5", f"{CP}=3", world=7)
    assert len(faults) == 4
    with pytest.raises(C.ConfigError, match="4 faults"):
        C.resolve(None, overrides=[f"{TP}=4", f"{PP}=5", f"{CP}=3"], world_size=7)


@settings(max_examples=60, deadline=None)
@given(tp=st.integers(1, 8), pp=st.integers(1, 8), cp=st.integers(1, 8), world=st.integers(1, 64))
def test_layout_verdict_is_the_divisibility_of_everything(tp, pp, cp, world):
    fits = 6 % tp == 0 and 12 % pp == 0 and 8192 % cp == 0 and world % (tp * pp * cp) == 0
    fits = fits and 32 % (world // (tp * pp * cp)) == 0
    assert (layout(f"{TP}={tp}", f"{PP}={pp}", f"{CP}={cp}", world=world) == []) == fits


# ---- what forms and help pages read


def test_fields_describe_every_key():
    found = C.fields()
    assert set(found) == set(_leaves(C.Config().model_dump()))
    for key, f in found.items():
        assert f.help and not f.help.endswith("."), key
        assert C.describe_limits(f), key


def _leaves(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_defaults_respect_their_own_limits():
    assert C.resolve(None).config.model.num_layers == 12


def test_print_config_shows_value_and_layer():
    text = C.print_config(C.resolve("demo", overrides=["rng.seed=7"]))
    assert re.search(r"^rng\.seed +7 +command line +seed of", text, re.M)
    assert re.search(r"^model\.ffn_hidden_size +\d+ +derived: 4 \* model.hidden_size +width of", text, re.M)
    assert re.search(r"^model\.text_dim +null +default +width of", text, re.M)
    assert len(text.splitlines()) == len(C.fields()) + 1
    assert "packs per optimizer step over all processes (int, >= 1)\n" in text


def test_attention_backends_are_those_of_the_attention_module():
    from dfm_nb.model import attention

    assert C.fields()["model.attention_backend"].limits["choices"] == ("auto", *attention.BACKENDS)


def test_nearest_name_is_found_for_any_one_letter_slip():
    keys = [k for k in C.fields() if len(k.rpartition(".")[2]) > 5]
    for key in keys:
        slip = key[:-3] + key[-2:]  # the third letter from the end is missing
        if slip in C.fields():
            continue
        with pytest.raises(C.ConfigError) as caught:
            C.resolve(None, overrides=[f"{slip}=1"])
        assert difflib.SequenceMatcher(None, slip, str(caught.value).rpartition("did you mean ")[2]).ratio() > 0.7, key


def test_sizes_are_choices_of_the_model():
    assert all(C.resolve(None, overrides=[f"model.size={name}"]).config.model.size == name for name in sizes.SIZES)


def test_a_run_keeps_what_the_package_has_changed_since_and_nothing_else(monkeypatch, tmp_path):
    given = ["model.size=tiny", "optimizer.lr=0.5", "train.train_iters=50"]
    stored = tmp_path / "config.yaml"
    stored.write_text(C.to_yaml(C.resolve("demo", overrides=given)))
    row = dataclasses.replace(sizes.SIZES["tiny"], adaln_lora_dim=8, hidden_size=128)
    monkeypatch.setitem(sizes.SIZES, "tiny", row)
    module = sys.modules[C.resolve.__module__]
    recipe = (module.RECIPES / "demo.yaml").read_text().replace("P_mean: -0.4", "P_mean: 3.0")
    (tmp_path / "demo.yaml").write_text(recipe)
    monkeypatch.setattr(module, "RECIPES", tmp_path)
    now = C.resolve("demo", overrides=["model.size=tiny", "optimizer.lr=0.25", "model.P_std=2"])
    kept = now.keeping(C.from_yaml(stored))
    changed = {k: kept.get(k) for k in C.fields() if kept.get(k) != now.get(k)}
    assert changed == {
        "model.adaln_lora_dim": None,
        "model.hidden_size": 64,
        "model.ffn_hidden_size": 256,
        "model.P_mean": -0.4,
    }
    assert kept.provenance == now.provenance
    assert (kept.get("optimizer.lr"), kept.get("train.train_iters"), kept.get("model.P_std")) == (0.25, 1000, 2.0)
    other = C.resolve(None, overrides=["model.size=demo"])
    assert other.keeping(C.from_yaml(stored)).config.model == other.config.model
