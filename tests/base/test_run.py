"""The run folder under kills, resumes and curious readers."""

import errno
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import psutil
import pytest

from dfm_nb.base.log import start_logging, stop_logging
from dfm_nb.base.metrics import Metrics, read_metrics
from dfm_nb.base.run import Run
from tests.json_files import read_json, write_json
from tests.refusals import refused


def record(i, **more):
    return {"iteration": i, "loss": 1 / 3 + i, **more}


def iterations(path) -> list[int]:
    return [r["iteration"] for r in read_metrics(path)]


# ---- folder


def test_create_refuses_files_and_data_sets(tmp_path):
    (tmp_path / "file").write_text("x")
    refused(str(tmp_path / "file"), Run.create, tmp_path / "file", error=NotADirectoryError)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "manifest.json").write_text("{}")
    refused(str(tmp_path / "shards"), Run.create, tmp_path / "shards", error=FileExistsError)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/iter_0000099.tmp/thesis.txt", "loss.png"])
def test_a_folder_that_was_never_a_run_is_refused_and_stays(tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    refused(name.partition("/")[0], Run.create, tmp_path, error=FileExistsError)
    assert [p.name for p in tmp_path.iterdir()] == [name.partition("/")[0]] and (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", [".", ".run.json"])
def test_the_run_of_another_user_is_refused(tmp_path, given_away, name):
    run = Run.create(tmp_path)
    run.claim()
    run.release()
    Run.create(tmp_path)
    given_away(tmp_path / name)
    refused(f"checkpoint.pretrained={tmp_path}", Run.create, tmp_path, error=PermissionError)


@pytest.mark.parametrize("name", ["log.txt", ".run.lock", "samples", "samples/iter_0000001", "checkpoints/a"])
def test_a_link_in_a_run_folder_is_refused(tmp_path, name):
    run = Run.create(tmp_path / "run")
    run.claim()
    run.release()
    link = run.path / name
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path)
    refused(name, Run.create, run.path)


# ---- owner


def test_owner_tells_a_reused_pid_apart(tmp_path, monkeypatch):
    run = Run.create(tmp_path)
    run.claim()
    claim = read_json(run.pid_file)
    boot_s = psutil.boot_time()
    with monkeypatch.context() as patched:  # the clock is set
        patched.setattr(psutil._pslinux, "boot_time", lambda: boot_s + 3600)
        patched.setattr(psutil, "boot_time", lambda: boot_s + 3600)
        assert run.owner().pid == os.getpid()
    write_json(run.pid_file, {**claim, "since_boot_s": claim["since_boot_s"] - 100})
    assert run.owner() is None
    run.pid_file.write_text("not json")
    assert run.owner() is None


@pytest.mark.slow
def test_of_many_processes_at_the_same_moment_one_gets_the_folder(tmp_path):
    """Each looks at a clock and claims at the same instant; the file of a look-then-write claim let several in."""
    run, start = Run.create(tmp_path), time.time() + 2
    code = (
        f"import sys, time; from dfm_nb.base.run import Run; run = Run.create({str(tmp_path)!r}); "
        f"time.sleep(max(0, {start} - time.time()))\n"
        "try: run.claim(); print('mine', flush=True)\n"
        "except FileExistsError as error: print('error', error, flush=True)\n"
        "sys.stdin.read()"  # who has it keeps it until all have tried
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(4)]
    said = [child.stdout.readline() for child in children]
    owner = run.owner().pid
    assert said.count("mine\n") == 1 and sum(line.startswith("error") for line in said) == 3, said
    refused(f"process {owner} ", run.claim, error=FileExistsError)
    (run.path / ".loss.png.00000000.tmp").touch()
    for child in children:
        child.kill()
        child.communicate(timeout=60)
    assert run.owner() is None  # a killed owner leaves a stale file, which counts for nothing
    run.claim()
    run.claim()
    assert run.owner().pid == os.getpid() and not list(run.path.glob(".*.tmp"))
    run.release()
    assert not run.pid_file.exists()


def test_a_claim_of_another_host_counts_while_its_owner_shows_life(tmp_path, monkeypatch):
    run = Run.create(tmp_path)
    write_json(run.pid_file, {"pid": 7, "host": "node-7", "started_s": 1.0})
    refused("process 7 of node-7", run.claim, error=FileExistsError)
    assert run.owner() is None  # not a process of this host
    long_ago = time.time() - 100
    os.utime(run.pid_file, (long_ago, long_ago))
    monkeypatch.setattr("dfm_nb.base.run.BEAT_S", 0.05)
    run.claim()
    assert run.owner().pid == os.getpid()
    os.utime(run.pid_file, (long_ago, long_ago))
    time.sleep(0.5)
    assert time.time() - run.pid_file.stat().st_mtime < 50  # the owner touched it again
    run.release()
    assert not run.pid_file.exists() and run.owner() is None


def test_a_file_system_without_locks_keeps_none_of_a_killed_owner(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    run = Run.create(tmp_path)
    run.claim()
    assert run.owner().pid == os.getpid() and not (run.path / ".run.lock").read_bytes()
    run.release()


def test_checkpoints_of_another_run_are_refused_by_its_name_and_a_moved_run_keeps_its_own(tmp_path):
    first, other, outside, old = (Run.create(tmp_path / name) for name in ("a", "b", "outside", "old"))
    (old.path / "iter_0000001").mkdir()
    for run in (first, other):
        run.claim()
    first.own(first.checkpoints)
    first.own(outside.path)
    for root in (first.checkpoints, outside.path, old.path):
        refused(str(root), other.own, root, error=FileExistsError)
    first.release()
    moved = Run(first.path.rename(tmp_path / "moved"))
    assert not moved.doubt() and "copied" in Run(shutil.copytree(moved.path, tmp_path / "copied")).doubt()
    for _ in range(2):
        moved.claim()
        for root in (moved.checkpoints, outside.path):
            moved.own(root)
        shutil.rmtree(moved.path)  # as on a node's own disk: the same command begins it anew
        moved.release()
        Run.create(moved.path)


def test_only_temporaries_of_our_own_form_are_removed(tmp_path):
    (tmp_path / ".folder.tmp").mkdir()
    for name in (".important.docx.tmp", ".loss.png.01234567.tmp"):
        (tmp_path / name).touch()
    run = Run.create(tmp_path)
    run.claim()  # of nobody's folder nothing is removed
    assert len(list(tmp_path.glob(".*.tmp"))) == 3
    run.release()
    run.claim()
    assert {p.name for p in tmp_path.glob(".*.tmp")} == {".folder.tmp", ".important.docx.tmp"}


# ---- metrics


def test_metrics_read_back_bit_for_bit(tmp_path):
    values = np.random.default_rng(0).standard_normal(200) * 10.0 ** np.arange(-100, 100)
    with closing(Metrics(tmp_path / "metrics.jsonl")) as metrics:
        for i, v in enumerate(values):
            metrics.write({"iteration": i, "loss": float(v), "np": np.float32(0.1), "keys": ["a"], "bad": math.nan})
    back = read_metrics(tmp_path)
    assert [r["loss"] for r in back] == values.tolist()
    assert back[0]["bad"] is None and back[0]["keys"] == ["a"]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_truncate_keeps_exactly_the_records_up_to_an_iteration(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(Metrics(path)) as metrics:
        for i in range(1, 11):
            metrics.write(record(i))
        metrics.write({"iteration": 6, "val_loss": 0.5})
        clean = [r for r in read_metrics(path) if r["iteration"] <= 6]
        metrics.truncate(6)
        assert read_metrics(path) == clean
        for i in range(7, 11):
            metrics.write(record(i))
    assert iterations(path) == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10]


def test_torn_last_line_is_ignored_by_readers_and_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration":1,"loss":2.0}\n{"iteration":2,"lo')
    assert read_metrics(path) == [{"iteration": 1, "loss": 2.0}]
    with closing(Metrics(path)) as metrics:
        metrics.write(record(2))
    assert iterations(path) == [1, 2]


def test_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    with closing(Metrics(tmp_path / "metrics.jsonl")) as metrics:
        metrics.write(record(1))
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:5]))
        with pytest.raises(OSError):
            metrics.write(record(2))
        monkeypatch.undo()
        assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"\n")
        metrics.write(record(2))
    assert iterations(tmp_path) == [1, 2]


# ---- log


@pytest.fixture
def logger(tmp_path):
    yield lambda rank=0: start_logging(tmp_path, rank)
    stop_logging()


def test_other_ranks_show_warnings_only_and_write_no_file(logger, tmp_path, capsys):
    log = logger(rank=3)
    log.info("quiet")
    log.warning("loud")
    assert capsys.readouterr().err == "[WARNING] [rank 3] loud\n"
    assert not (tmp_path / "log.txt").exists()
    stop_logging()
    assert logging.getLogger("dfm_nb").handlers == [] and logging.getLogger("dfm_nb").propagate


def test_a_name_cannot_control_the_terminal(logger, tmp_path, capsys):
    name = "a\x1b[2J\x07\r\x9b\udcff é\tb\nc"
    logger().warning("%s", name)
    shown = "a\\x1b[2J\\x07\\r\\x9b\\udcff é\tb\nc\n"
    assert capsys.readouterr().err == f"[WARNING] {shown}"
    assert (tmp_path / "log.txt").read_text().endswith(f"[WARNING] {shown}")


@pytest.mark.parametrize("line", ["nothing", '{"iteration": true}'])
def test_a_damaged_metrics_line_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 0.5}\n' + line + "\n")
    refused(r"metrics\.jsonl, line 2", read_metrics, tmp_path)


@pytest.mark.parametrize("instead", ["nothing", "folder", "run"])
def test_the_writer_of_a_folder_that_was_moved_stops_and_touches_no_other(tmp_path, instead):
    run = Run.create(tmp_path / "run")
    run.claim()
    run.check_place()
    run.path.rename(tmp_path / "moved")
    if instead != "nothing":
        run.path.mkdir()
    if instead == "run":
        run.pid_file.write_text("{}")
    refused(str(run.path), run.tell, "saving", error=FileNotFoundError)
    run.release()
    assert run.pid_file.exists() == (instead == "run")
    moved = Run.create(tmp_path / "moved")
    moved.claim()
    moved.release()
