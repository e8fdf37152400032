"""The three layers, and every fault a user can make in them."""

import json
import pickle
import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dfm_nb import config as C
from dfm_nb.base import plugins
from dfm_nb.base.options import fields, option
from dfm_nb.checkpoints import loading
from dfm_nb.config import notation, sizes
from dfm_nb.config.checks import layout_faults
from dfm_nb.config.schema import FIELDS
from dfm_nb.train import TrainOptions
from tests.attacks.checkpoint_files import copy_run
from tests.networks import cases
from tests.refusals import refused

REFERENCE = Path(__file__).parent / "dit_pretrain.yaml"


def write(folder, text, name="my.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def resolved(recipe, *overrides, **more):
    return C.resolve(recipe, overrides=list(overrides), **more)


def faulty(name, call, *given, **more):
    with pytest.raises(C.ConfigError, match=name) as caught:
        call(*given, **more)
    return caught.value


# ---- layers


def test_resolve_later_layers_win(tmp_path):
    file = write(tmp_path, "train:\n  train_iters: 77\n  eval_iters: 3\n")
    r = C.resolve("demo", file, ["train.train_iters=99"])
    assert r.config.train.train_iters == 99 and r.provenance["train.train_iters"] == "command line"
    assert r.config.train.eval_iters == 3 and r.provenance["train.eval_iters"] == str(file)
    assert r.provenance["optimizer.lr"] == "recipe demo"
    assert r.config.rng.seed == 1234 and r.provenance["rng.seed"] == "default"


def test_the_reference_yaml_resolves_with_and_without_data(tmp_path):
    for asked, data in (("dataset.mock=true", (True, None)), (f"dataset.path={tmp_path}", (False, str(tmp_path)))):
        r = C.resolve("default", REFERENCE, [asked], training=True, world_size=8)
        assert (r.config.dataset.mock, r.config.dataset.path) == data
        assert r.config.checkpoint.load == r.config.checkpoint.checkpoint_dir == "dfm_experiment"
        assert (r.config.model.num_attention_heads, r.config.dataset.task_encoder_seq_length) == (16, 15360)
        told = "\n".join(r.notices)
        assert "model.qkv_format" in told and "checkpoint.load_optim" in told and str(REFERENCE) in told
        again = C.resolve("demo", write(tmp_path, C.to_yaml(r)), training=True)  # a saved config.yaml is a layer
        assert (again.config.dataset, again.notices) == (r.config.dataset, ())


def test_mock_and_a_path_put_each_other_aside_across_layers(tmp_path):
    path, mock = write(tmp_path, "dataset: {path: /x}", "p.yaml"), write(tmp_path, "dataset: {mock: true}", "m.yaml")
    by_mock, by_path = C.resolve("demo", path, ["dataset.mock=true"]), C.resolve("demo", mock, ["dataset.path=/y"])
    assert (by_mock.config.dataset.mock, by_mock.config.dataset.path) == (True, None)
    assert by_mock.notices == (f"dataset.mock (command line) overrides dataset.path=/x ({path})",)
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
        ("checkpoint.save=/a b/c=d", "checkpoint.checkpoint_dir", "/a b/c=d"),
        ("ema.sigma_rels=[0.05]", "ema.sigma_rels", [0.05]),
        ("validation.prompts=a red fox", "validation.prompts", ["a red fox"]),
        ("validation.prompts='[apple, fruit]'", "validation.prompts", ["[apple, fruit]"]),
        ('validation.prompts=["a red moth, resting", blue]', "validation.prompts", ["a red moth, resting", "blue"]),
        ("mixed_precision=bf16_mixed", "mixed_precision", "bf16"),
        ("train.log_interval=5", "logger.log_interval", 5),
        ("++train.log_interval=5", "logger.log_interval", 5),
    ],
)
def test_resolve_reads_values_as_yaml(override, key, value):
    got = resolved(None, override).get(key)
    assert got == value and type(got) is type(value)


WORDS = ["1.10", "2024_01_15", "007", "#1", "set #2", "12e4567", "12:30", "0x1f", "no", "a: b", "[x]", " x", "'a' b"]


@pytest.mark.parametrize("word", WORDS)
def test_a_setting_that_is_text_keeps_the_words(word, tmp_path):
    key = "checkpoint.checkpoint_dir"
    written = f"{key}={notation.write_value(word)}"
    for overrides in (
        [f"{key}={word}"],
        [written],
        ["checkpoint={checkpoint_dir: " + notation.write_value(word) + "}"],
    ):
        assert resolved(None, *overrides).get(key) == word
    flag = TrainOptions.parse([f"--dataset-path={word}", "--print-config"])
    assert flag.resolve(1).config.dataset.path == word
    assert TrainOptions(overrides={key: word, "logger.wandb_exp_name": "\U0001f98b"}).overrides == [
        written,
        "logger.wandb_exp_name=\U0001f98b",
    ]


def test_home_in_a_path_is_not_a_folder_of_that_name(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    r = resolved(None, "checkpoint.checkpoint_dir=~/a", "dataset.path=s3://b/~")
    assert (r.config.checkpoint.checkpoint_dir, r.config.dataset.path) == ("/home/me/a", "s3://b/~")


def test_a_file_keeps_the_words_of_text_and_null_is_none(tmp_path):
    text = "{checkpoint: {checkpoint_dir: 1.10, load: null}, validation: {prompts: [007, yes, '8']}}"
    r = C.resolve(None, write(tmp_path, text), ["checkpoint.pretrained=null", "logger.wandb_exp_name='null'"])
    assert (r.config.checkpoint.checkpoint_dir, r.config.checkpoint.load, r.config.checkpoint.pretrained) == (
        "1.10",
        None,
        None,
    )
    assert r.config.validation.prompts == ["007", "yes", "8"] and r.config.logger.wandb_exp_name == "null"


@pytest.mark.parametrize("number", ["010", "1:30", "0x1f", "0b11"])
def test_numbers_that_yaml_reads_otherwise_than_people_are_refused(number, tmp_path):
    for key in ("train.train_iters", "train.minutes"):
        for file, words in ((None, [f"{key}={number}"]), (write(tmp_path, f"{{train: {{{key[6:]}: {number}}}}}"), [])):
            faulty(f"{key}.*{number}", C.resolve, None, file, words)


def test_resolve_takes_an_empty_file_and_empty_groups(tmp_path):
    assert C.resolve("demo", write(tmp_path, "")).config == C.resolve("demo").config
    assert C.resolve("demo", write(tmp_path, "model:\ntrain: {}\n")).config == C.resolve("demo").config


@pytest.mark.parametrize("name", C.recipes())
def test_every_recipe_resolves(name):
    weights = ["checkpoint.pretrained=butterflies"] if name == "student" or name.startswith("finetune") else []
    overrides = ["dataset.mock=true", *weights]
    assert C.resolve(name, overrides=overrides, training=True, world_size=1)
    if name.startswith("finetune"):
        faulty("checkpoint.pretrained", C.resolve, name, overrides=["dataset.mock=true"], training=True, world_size=1)


# ---- sizes and derived values


def test_size_sets_shape_below_the_settings_of_its_own_layer(tmp_path):
    file = write(tmp_path, "model:\n  size: dit-xl\n  num_layers: 4\n")
    r = C.resolve("demo", file)
    assert (r.config.model.size, r.config.model.num_layers, r.config.model.hidden_size) == ("DiT-XL", 4, 1152)
    assert r.provenance["model.hidden_size"] == f"size DiT-XL ({file})"
    assert C.resolve("demo", file, ["model.size=DiT-B"]).config.model.num_layers == 12  # a later layer wins


def test_saved_config_is_a_layer_whose_derived_values_are_derived_again(tmp_path):
    saved = resolved("demo", "train.train_iters=300")
    assert saved.config.scheduler.lr_decay_iters == 300
    file = write(tmp_path, C.to_yaml(saved))
    again = C.resolve("default", file, ["model.hidden_size=384", "train.train_iters=500"])
    assert again.config.model.ffn_hidden_size == 1536
    assert again.config.scheduler.lr_decay_iters == 500
    assert again.config.model.num_layers == saved.config.model.num_layers


def test_short_runs_need_no_warmup_of_their_own():
    for iters, warmup in ((1, 0), (50, 5), (10_000, 100)):
        scheduler = resolved("default", f"train.train_iters={iters}").config.scheduler
        assert (scheduler.lr_warmup_iters, scheduler.lr_decay_iters) == (warmup, iters)


def test_with_derived_fills_nulls_only():
    r = resolved(None, "model.in_channels=8")
    filled = r.with_derived({"model.in_channels": 16, "model.text_dim": 7}, "the data set")
    assert (filled.config.model.in_channels, filled.config.model.text_dim) == (8, 7)
    assert filled.provenance["model.text_dim"] == "derived: the data set"
    assert r.config.model.text_dim is None
    faulty("model.text_dim", r.with_derived, {"model.text_dim": -1}, "the data set")


def test_to_yaml_and_from_yaml_are_inverse(tmp_path):
    r = resolved("demo", "validation.prompts=[a, 'b: c', '1e4']", "checkpoint.save='2026-01-01'")
    r = r.with_derived({"train.exit_duration_s": 0.5123456789012345, "model.text_dim": 7}, "the data set")
    assert C.from_yaml(write(tmp_path, C.to_yaml(r))) == r


# ---- faults: overrides separated by blanks, and what the message must hold


def test_each_setting_of_upstream_is_taken_implied_or_refused_with_the_right_name():
    """`upstream_keys.txt` lists them and what becomes of each."""
    for line in Path(__file__).with_name("upstream_keys.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        override, kind, name = re.fullmatch(r"(.+?) +(=|implied|!) ?(.*)", line).groups()
        try:
            got = resolved(None, override)
        except C.ConfigError as error:
            assert kind == "!" and name in str(error), (line, str(error))
            continue
        taken = [key for key, origin in got.provenance.items() if origin == "command line"]
        assert taken == [name] * (kind == "=") and len(got.notices) == (kind == "implied"), line


def test_a_key_named_as_the_right_one_is_one():
    upstream = notation.read((Path(C.__file__).parent / "upstream.yaml").read_text())
    texts = [*upstream["aliases"].values(), *upstream["instead"].values(), *upstream["implied"]]
    named = {key for text in texts for key in re.findall(r"[a-z]+(?:\.[A-Za-z_]+)+", text)}
    assert named - {"config.yaml", "metrics.jsonl"} <= C.FIELDS.keys()


def test_tilde_takes_a_key_or_a_group_out_of_the_layers_below(tmp_path):
    file = write(tmp_path, "train: {train_iters: 7, eval_iters: 3}\ncheckpoint: {save: a}\nprofiling: {nvtx: true}\n")
    taken = ["~train.train_iters", "~checkpoint.checkpoint_dir", "~profiling", "~ema.sigma_rels=[]"]
    r = C.resolve("demo", file, taken)
    assert r.config.train.train_iters == C.FIELDS["train.train_iters"].default
    assert (r.config.train.eval_iters, r.config.checkpoint.checkpoint_dir) == (3, None)
    assert resolved("demo", "~rng.seed", "rng.seed=5").config.rng.seed == 5
    faulty("rng.seed", resolved, "demo", "~rng.sed")


FAULTS = [
    ("model.hiden_size=3", "model.hidden_size"),  # the nearest by spelling
    ("train.lr=1", "optimizer.lr"),
    ("model.qkv_format=sbhd", "model.qkv_format"),
    ("train.train_iters", "group.key=value"),
    ("model.num_layers=0", "model.num_layers"),
    ("model.size=DiT-XLL", "DiT-XL"),
    ("validation.frames=10", "9 or 13"),
    ("checkpoint.save=a checkpoint.checkpoint_dir=b", "checkpoint.save"),
    ("model.num_attention_heads=7", "model.hidden_size"),
    ("train.train_iters=50 scheduler.lr_warmup_iters=60", "scheduler.lr_warmup_iters"),
    ("train.micro_batch_size=5", "train.micro_batch_size"),
    ("dataset.mock=true dataset.path=/x", "dataset.path"),
    ("model.patch_temporal=2 dataset.condition_frames_prob=0.5", "dataset.condition_frames_prob"),
    ("model.patch_temporal=2 dataset.condition_last_prob=0.5", "dataset.condition_last_prob"),
    ("validation.prompts=[a", "validation.prompts"),
    ("model.lora.alpha=4", "model.lora.rank"),
    ("model.variant=none", "model.variant"),
    ("optimizer.optimizer=muon optimizer.use_distributed_optimizer=true", "optimizer.use_distributed_optimizer"),
    *cases("REFUSED", {}).values(),
]


@pytest.mark.parametrize("overrides, name", FAULTS)
def test_fault_is_reported_with_its_key(overrides, name):
    error = faulty(re.escape(name), resolved, "default", *overrides.split())
    assert len(error.faults) == 1 and "command line" in str(error)


def test_faults_of_all_layers_carry_their_file(tmp_path):
    file = write(tmp_path, "model:\n  numlayers: 3\n  hidden_size: wide\ncheckpiont:\n  save: x\n")
    lines = str(faulty("", C.resolve, "demo", file, ["optimizer.lr=x"])).splitlines()
    assert sum(str(file) in line for line in lines) == 3 and sum("command line" in line for line in lines) == 1
    assert "model.num_layers" in lines[1] and "checkpoint.save" in lines[2]


def test_broken_or_missing_file_or_recipe_is_reported(tmp_path):
    twice = "model:\n  num_layers: 1\n  num_layers: 2\n"
    for file in (tmp_path / "none.yaml", write(tmp_path, "model: [1, 2", "a.yaml"), write(tmp_path, twice, "b.yaml")):
        faulty(file.name, C.resolve, "demo", file)
    faulty("demo", C.resolve, "dem")


def test_training_needs_data_and_weights_that_exist(tmp_path):
    (tmp_path / "butterflies").mkdir()
    overrides = [f"dataset.path={tmp_path}/buterflies", "checkpoint.load_checkpoint=/none/x"]
    said = str(faulty("", resolved, "demo", *overrides, training=True))
    assert all(name in said for name in (f"{tmp_path}/butterflies", "checkpoint.load_checkpoint"))
    assert resolved("demo", f"dataset.path={tmp_path}/butterflies", training=True)


def test_folder_to_resume_from_may_be_absent_but_a_named_checkpoint_may_not(tmp_path):
    def resolve(key, path):
        return resolved("demo", "dataset.mock=true", f"checkpoint.{key}={tmp_path / path}", training=True)

    (tmp_path / "iter_0005000").mkdir()
    (tmp_path / "model.safetensors").touch()
    for key in ("load", "load_checkpoint", "pretrained"):
        assert resolve(key, "iter_0005000") and resolve(key, "iter_5000/")  # as the reference's pages write it
        faulty(f"checkpoint.{key}.*iter_4000", resolve, key, "iter_4000")
    assert resolve("load", "nothing/yet")
    faulty("checkpoint.load.*s3://a", resolved, "demo", "dataset.mock=true", "checkpoint.load=s3://a", training=True)
    faulty("checkpoint.load", resolve, "load", "model.safetensors")


def test_config_error_survives_a_worker_process():
    error = faulty("", resolved, None, "rng.seed=x")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_no_layer_takes_anything_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    file = write(tmp_path, "logger:\n  wandb_project: ${oc.env:SECRET}\n")
    for read in (lambda: C.from_yaml(file), lambda: C.resolve("demo", file)):
        assert "hunter2" not in str(faulty("wandb_project", read))


NASTY = [
    "", "null", "true", "0", "-1", "3", "2147483647", "9" * 30, "-" + "9" * 400, "9" * 5000, "0x" + "f" * 5000,
    "1e400", "-1e400", ".inf", ".nan", "1e300", "1e-320", "0.5", "word", "'1e-4'", "???", "${oc.env:HOME}", "${a.b}",
    "2026-01-01", "1:30:00", "!!int x", "!!bool x", "!!timestamp x", "!!python/name:os.system", "[", "{a: 1}", "[]",
    "[[]]", "[[1, 2, 3]]", "[a, null, 1.5]", "[" * 9, "[" * 1500, "[" + "1," * 90 + "]", "&a [*a]", "{? [1] : 2}",
    "/\0x", "x" * 5000, "é\n  b", "&a [&b [&c [1,1],*c,*c],*b,*b]",
]  # fmt: skip
HUGE = ["2147483647", "9" * 30, "1e300"]  # for every key: some rules count up to a value


def says_one_sentence_or_settles(key, text):
    began = time.process_time()
    try:
        resolved(None, f"{key}={text}", training=True, world_size=2)
    except C.ConfigError as error:
        assert all("\n" not in str(fault) and len(str(fault)) < 1000 for fault in error.faults), str(error)
    assert time.process_time() - began < 5  # no value makes a rule count for ever


@pytest.mark.parametrize("text", NASTY, ids=lambda text: text[:12])
def test_any_value_for_a_key_of_each_type_settles_or_is_one_sentence(text):
    of_each_type = {str(f.type): key for key, f in C.FIELDS.items()}.values()
    for key in C.FIELDS if text in HUGE else of_each_type:
        says_one_sentence_or_settles(key, text)


TEXT = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=20)  # PyYAML folds odd line ends
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(VALUES)
@example("\xa0")
@example("010")
@example("null")
def test_notation_reads_what_it_writes(value):
    again = notation.read(notation.write_value(value))
    assert repr(again) == repr(value)  # as text, because nan is not itself
    if isinstance(value, str):
        assert notation.read_text(notation.write_value(value)) == value
    assert repr(notation.read(notation.write([value, value]))) == repr([value, value])  # one object twice: no alias


MERGE = "m0: &m0 {a: 1}\n" + "".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("text", "named"),
    [(MERGE, "alias"), ("a: &a [1]\nb: *a", "alias"), ("<<: {a: 1}", "merge"), ("a: 1\n" * 300_000, "MiB")],
)
def test_notation_has_no_aliases_merge_keys_or_large_texts(text, named):
    refused(named, notation.read, text)


# ---- layouts


def layout(*overrides, world):
    return [str(fault) for fault in layout_faults(resolved(None, *overrides).config, world)]


TP, PP, CP = (f"model.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))


@pytest.mark.parametrize(
    "overrides, world, names",
    [
        (f"{TP}=4", 4, ["model.num_attention_heads", "2, 3, 6"]),
        (f"{PP}=2 model.virtual_pipeline_model_parallel_size=4", 2, ["2, 3, 6"]),
        (f"{PP}=4 model.virtual_pipeline_model_parallel_size=3 train.global_batch_size=6", 4, ["4 or 8"]),
    ],
)
def test_layout_fault_names_the_nearest_legal_values(overrides, world, names):
    (fault,) = layout(*overrides.split(), world=world)
    assert all(name in fault for name in names), fault


@settings(max_examples=60, deadline=None)
@given(tp=st.integers(1, 8), pp=st.integers(1, 8), cp=st.integers(1, 8), world=st.integers(1, 64))
def test_layout_verdict_is_the_divisibility_of_everything(tp, pp, cp, world):
    fits = 6 % tp == 0 and 12 % pp == 0 and 8192 % cp == 0 and world % (tp * pp * cp) == 0
    fits = fits and 32 % (world // (tp * pp * cp)) == 0
    assert (layout(f"{TP}={tp}", f"{PP}={pp}", f"{CP}={cp}", world=world) == []) == fits


# ---- what forms and help pages read


def test_a_setting_of_the_network_is_one_field(monkeypatch, tmp_path):
    """Subclasses stand for two more lines in the schema: the command line and fine-tuning know them without a list."""

    class Wider(C.ModelConfig):
        gate: float = option(1.0, "strength of the gate")
        kernel: int = option(3, "kernel of this machine", network=False)

    class Settings(C.Config):
        model: Wider = Wider()

    monkeypatch.setattr(sys.modules[C.resolve.__module__], "Config", Settings)
    for key, field in fields(Settings).items():
        monkeypatch.setitem(FIELDS, key, field)
    given = resolved("demo", "model.gate=2.5", "model.kernel=5")
    assert re.search(r"^model\.gate +2\.5 +command line +strength of the gate", C.print_config(given), re.M)
    (copy_run(tmp_path / "run") / "config.yaml").write_text(C.to_yaml(given))
    taken = loading.settings_of(tmp_path / "run")
    assert taken["model.gate"] == 2.5 and "model.kernel" not in taken


def test_attention_backends_are_those_of_the_attention_module():
    from dfm_nb.model import attention

    assert C.FIELDS["model.attention_backend"].limits["choices"] == ("auto", *attention.BACKENDS)


def test_a_run_keeps_what_the_package_has_changed_since_and_nothing_else(monkeypatch, tmp_path):
    given = ["model.size=tiny", "optimizer.lr=0.5", "train.train_iters=50"]
    stored = tmp_path / "config.yaml"
    stored.write_text(C.to_yaml(resolved("demo", *given)))
    monkeypatch.setitem(sizes.SIZES, "tiny", sizes.SIZES["tiny"] | {"adaln_lora_dim": 8, "hidden_size": 128})
    module = sys.modules[C.resolve.__module__]
    recipe = module.RECIPES["demo"].read_text().replace("P_mean: -0.4", "P_mean: 3.0")
    (tmp_path / "demo.yaml").write_text(recipe)
    monkeypatch.setitem(module.RECIPES, "demo", tmp_path / "demo.yaml")
    asked = ["model.size=tiny", "optimizer.lr=0.25", "model.P_std=2"]
    now, kept = (resolved("demo", *asked, run_dir=run_dir) for run_dir in (None, tmp_path))
    begun = resolved("demo", *asked, f"checkpoint.load_checkpoint={tmp_path}")
    assert begun.config.model == kept.config.model != now.config.model
    changed = {k: kept.get(k) for k in C.FIELDS if kept.get(k) != now.get(k)}
    shape = {"model.adaln_lora_dim": None, "model.hidden_size": 64, "model.ffn_hidden_size": 256}
    assert changed == shape | {"model.P_mean": -0.4}
    assert kept.provenance == now.provenance
    assert (kept.get("optimizer.lr"), kept.get("train.train_iters"), kept.get("model.P_std")) == (0.25, 1600, 2.0)
    kept, now = (resolved(None, "model.size=demo", run_dir=run_dir) for run_dir in (tmp_path, None))
    assert kept.config.model == now.config.model


def test_auto_is_settled_once_and_a_resumed_run_keeps_it(tmp_path, monkeypatch):
    stored = tmp_path / "config.yaml"
    new = C.resolve("demo")
    assert new.config.mixed_precision == "auto"
    stored.write_text(C.to_yaml(new.with_derived({"mixed_precision": "bf16"}, "the processor")))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    for run_dir in (tmp_path, f"~/{tmp_path.name}"):
        assert C.resolve("demo", run_dir=run_dir).config.mixed_precision == "bf16"
    assert C.resolve("demo", stored).config.mixed_precision == "auto"  # a new run settles it anew
    asked = resolved("demo", "mixed_precision=auto", run_dir=tmp_path)
    stored.write_text(C.to_yaml(asked))  # and a third time
    assert C.resolve("demo", run_dir=tmp_path).config.mixed_precision == "bf16"
    (own := tmp_path / "own").mkdir()  # what the user set then, and no longer sets, does not count
    (own / "config.yaml").write_text(C.to_yaml(resolved("demo", "model.attention_backend=sdpa")))
    assert C.resolve("demo", run_dir=own).config.model.attention_backend == "auto"
    given = ["mixed_precision=fp32"]
    assert resolved("demo", *given, run_dir=tmp_path).config.mixed_precision == "fp32"


def test_a_run_with_a_checkpoint_keeps_what_it_began_with(tmp_path):
    begun = resolved("demo", "checkpoint.pretrained=butterflies")
    (tmp_path / "config.yaml").write_text(C.to_yaml(begun))
    assert C.resolve("demo", run_dir=tmp_path).config.checkpoint.pretrained is None
    (tmp_path / "checkpoints" / "iter_0000001").mkdir(parents=True)
    assert C.resolve("demo", run_dir=tmp_path).config.checkpoint.pretrained == "butterflies"


@pytest.mark.parametrize("key, value", [("logger.report_to", ["a:b"]), ("generation.sampler", "a:b")])
def test_weights_and_a_run_that_is_resumed_name_no_module(key, value, tmp_path, monkeypatch):
    stored = tmp_path / "config.yaml"
    asked = [f"{key}={json.dumps(value)}"]
    start = [f"checkpoint.pretrained_checkpoint={tmp_path}"]  # the name in Megatron-Bridge
    monkeypatch.setattr(plugins, "_typed", set())
    stored.write_text(C.to_yaml(resolved("demo", *asked)).replace(f"  {key}: command line\n", ""))
    monkeypatch.setattr(plugins, "_typed", set())  # another process
    faulty(key, C.resolve, "demo", run_dir=tmp_path)
    faulty(key, resolved, "demo", *start, settings_of=lambda path: {key: value})
    assert resolved("demo", *asked, run_dir=tmp_path).get(key) == value
    assert resolved("demo", *start, *asked, settings_of=lambda path: {key: value}).get(key) == value


def test_each_setting_is_read_outside_config():
    package = Path(C.__file__).parents[1]
    read = "".join(p.read_text() for p in package.rglob("*.py") if p.parent != package / "config")
    unread = {key for key in FIELDS if not re.search(rf"\b{key.rpartition('.')[2]}\b", read)}
    assert unread == {f"optimizer.adam_{name}" for name in ("beta1", "beta2", "eps")}, "passed by megatron-core's names"
