"""A folder that somebody else made ends no view, hangs none, and puts neither tags nor other files into one."""

import ast
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

import dfm_nb
import workbench
from dfm_nb.base.video import write_png
from dfm_nb.experiments.runs import run_page
from tests.attacks.checkpoint_files import copy_run
from tests.frames import black
from tests.json_files import read_json, write_json
from workbench import Gallery, Launcher, Monitor, Runs
from workbench.launcher_panel import Panel

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
VIEWS = {
    "launcher": lambda run: Panel(Launcher.attach(run)).html(),
    "monitor": lambda run: Monitor(run)._content()[0],
    "runs": lambda run: Runs(run.parent)._content()[0],
    "page": run_page,
    "gallery": lambda run: Gallery(run).html(),
}


@pytest.fixture(autouse=True)
def no_view_hangs():
    def late(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A run folder with a record, a log, and a picture with its settings."""
    monkeypatch.setattr(Panel, "_follow", lambda panel: None)
    for drawn in ("dfm_nb.display.plots.loss_png", "workbench.monitor.Monitor.png"):
        monkeypatch.setattr(drawn, lambda *_: b"")
    copy_run(run := tmp_path / "all" / "run")
    (tmp_path / "secret").write_text(SECRET)
    (place := run / "samples" / "iter_0000003").mkdir(parents=True, exist_ok=True)
    write_png(place / "a.png", black(8, 8))
    write_json(place / "a.png.json", {"prompt": "p", "seed": 1})
    told = {"argv": [], "nproc": 1, "program": "dfm_nb.train", "exit_code": 1, "log_offset_bytes": 0}
    write_json(run / "launch.json", told)
    (run / "launch.log").write_text("error: it failed\n")
    return run


def seen(view, run: Path) -> str:
    """What a view shows, or its one sentence."""
    try:
        return view(run)
    except (ValueError, OSError) as error:
        assert "\n" not in str(error)
        return str(error)


KINDS = {
    "pipe": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to(path.parents[path.parts[::-1].index("all")] / "secret"),
}
FILES = "launch.log launch.json metrics.jsonl config.yaml run.pid verdict.json notes.json .run.json".split()
FILES += [f"samples/iter_0000003/{name}" for name in ("a.png", "a.png.json", "b.png")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_what_stands_for_a_file_is_not_read(foreign, file, kind):
    (foreign / file).unlink(missing_ok=True)
    KINDS[kind](foreign / file)
    if file == "metrics.jsonl":
        (foreign / "launch.json").unlink()
    for view in VIEWS.values():
        shown = seen(view, foreign)
        assert SECRET not in shown and len(shown) < 1 << 20


RECORDS = [("launch.json", "log_offset_bytes", value) for value in (-5, 2**70, "0")]
RECORDS += [("launch.json", "started_s", float(value)) for value in ("nan", "-1e300")]
RECORDS += [("launch.json", "pid", value) for value in (10**30, -1)]
RECORDS += [("run.pid", "since_s", value) for value in (float("nan"), -1e300, "1", 10**400)]
RECORDS += [("run.pid", "pid", 10**30), ("notes.json", "note", {}), ("verdict.json", "verdict", 1e400)]


@pytest.mark.parametrize("file, key, value", RECORDS, ids=str)
def test_odd_values_in_records_end_no_view(foreign, file, key, value, monkeypatch):
    path = foreign / file
    told = read_json(path) if path.exists() else {"phase": "training", "host": "x", "started_s": 1.0}
    write_json(path, {**told, key: value})
    monkeypatch.setattr("workbench.monitor.Watched.state", "running")
    (foreign / "config.yaml").write_text(f"train:\n  train_iters: 1{'0' * 400}\n")
    for view in VIEWS.values():
        seen(view, foreign)


TAG = '1"><img src=x onerror=alert(1)>'
FIELDS = "prompt name seed guidance num_steps sampler iteration fps caption_of".split()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [TAG, [TAG], {TAG: TAG}], ids=["text", "list", "object"])
def test_a_clips_settings_are_no_html(foreign, field, value):
    told = {"prompt": "p", "seed": 1, field: value}
    write_json(foreign / "samples/iter_0000003/a.png.json", told)
    for view in VIEWS.values():
        assert "<img src=x" not in seen(view, foreign)
    assert "<figure" in Gallery(foreign).html()


@pytest.mark.parametrize("file", ["launch.log", "notes.json", "verdict.json", "run.pid", "launch.json"])
def test_other_files_of_a_run_are_no_html(foreign, file):
    told = {"argv": [TAG], "exit_code": 1, "phase": TAG, "since_s": time.time(), "note": TAG, "tags": TAG}
    write_json(foreign / file, told | {"verdict": {"sentence": TAG}})
    run = foreign.rename(foreign.parent / TAG.replace("/", ""))
    for view in VIEWS.values():
        assert "<img src=x" not in seen(view, run)


def test_a_link_is_no_run_of_a_folder_and_files_of_others_stay(foreign):
    outside = foreign.parents[1] / "outside"
    copy_run(outside)
    (foreign.parent / "evil").symlink_to(outside)
    for name in ("report.html", "notes.json"):
        (foreign / name).write_text('{"of": "others"}')
    runs = Runs(foreign.parent)
    assert list(runs.paths) == ["run"]
    for write in (runs.report, runs.annotate):
        with pytest.raises(FileExistsError):
            write("run")
        assert (foreign / "notes.json").read_text() == (foreign / "report.html").read_text() == '{"of": "others"}'
    (foreign / "report.html").unlink()
    for _ in range(2):  # again over our own
        assert runs.report("run").is_file()


@pytest.mark.parametrize("view", VIEWS)
def test_text_that_is_no_utf8_can_be_shown_and_written(foreign, view):
    half = json.dumps({"prompt": "\ud800", "tags": "\ud800", "note": "\ud800"})
    (foreign / "samples/iter_0000003/a.png.json").write_text(half)
    (foreign / "notes.json").write_text(half)
    run = foreign.rename(foreign.parent / os.fsdecode(b"r\xff"))
    VIEWS[view](run).encode()


TAGS = re.compile(r"</?[a-z]\w*[ >]")


def test_html_is_built_in_one_place():
    """A text with values in it has no tags, but in `base.markup.fill`; nothing else marks what a value is made of."""
    for path in [*Path(dfm_nb.__file__).parent.rglob("*.py"), *Path(workbench.__file__).parent.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            texts = [part.value for part in getattr(node, "values", ()) if isinstance(part, ast.Constant)]
            found = isinstance(node, ast.JoinedStr) and any(TAGS.search(text) for text in texts)
            assert not found, f"{path}:{node.lineno}"
            escapes = isinstance(node, ast.Attribute) and node.attr == "escape" and node.value.id == "html"
            assert not escapes or path.name == "markup.py", path
