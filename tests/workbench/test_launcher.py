"""The launcher: starts, finds again, stops whole trees, says why a run failed; with a small program under torchrun."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import workbench
from dfm_nb.base import process
from dfm_nb.base.run import Run
from tests.json_files import write_json
from tests.processes import alive, wait_until
from tests.refusals import refused
from workbench import supervisor
from workbench.job import Job, RunFailed
from workbench.launcher import PREPARE, NotOurs

pytestmark = pytest.mark.slow

FAKE = """
import json, os, pathlib, subprocess, sys, time
run, steps, ending = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rank = os.environ.get("RANK", "0")
done = run / f"done{rank}.txt"
first = int(done.read_text()) + 1 if done.exists() else 1
if ending == "child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for i in range(first, steps + 1):
    if rank == "0":
        with open(run / "metrics.jsonl", "a") as f:
            f.write(json.dumps({"iteration": i, "loss": 1 / i}) + "\\n")
        print(f"[INFO] Iteration {i}/{steps}", flush=True)
    done.with_suffix(".part").write_text(str(i))
    done.with_suffix(".part").replace(done)
    time.sleep(0.02)
if ending == "rank 1" and rank == "1":
    last = run / "done0.txt"
    while not (last.exists() and int(last.read_text()) >= steps):  # rank 0 has printed
        time.sleep(0.02)
    raise KeyError("the sample has no caption")
if ending == "mistake":
    sys.stderr.write("error: --limit must be at least 1; got 0\\n")
    sys.exit(2)
if ending == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def program(tmp_path) -> Path:
    path = tmp_path / "fake_trainer.py"
    path.write_text(FAKE)
    return path


@pytest.fixture
def launch(tmp_path, program):
    """Launchers of the small program; whatever they started is gone after the test."""
    made = []

    def make(steps: int = 5, ending: str = "well", nproc: int = 1, folder: str = "run", **settings):
        run = tmp_path / folder
        words = [run, steps, ending]
        made.append(workbench.Launcher(run, words, nproc, program=str(program), cwd=tmp_path, **settings))
        return made[-1]

    yield make
    for launcher in made:
        launcher.job.stop(grace_s=1)


def panel_of(launcher):
    launcher.widget  # noqa: B018
    return launcher._panel


def usable(panel) -> list[str]:
    return [name for name, button in panel.buttons.items() if not button.disabled]


async def awaited(launcher):
    await launcher.wait()


@pytest.fixture
def front_end(monkeypatch):
    monkeypatch.setenv("DFM_HEADLESS", "0")


def steps_done(launcher) -> int:
    path = launcher.run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    "ending, cause",
    [
        ("rank 1", "KeyError: 'the sample has no caption' (rank 1)"),
        ("mistake", "--limit must be at least 1; got 0"),
        ("killed", "the process of rank 0 was ended by SIGKILL; often the machine ran out of memory"),
    ],
)
def test_failing_run_raises_its_own_error_last(launch, ending, cause):
    launcher = launch(steps=2, ending=ending, nproc=2 if ending == "rank 1" else 1).start()
    with pytest.raises(RunFailed) as failed:
        launcher.wait()
    assert str(failed.value).splitlines()[-1] == cause
    assert "[INFO] Iteration 2/2" in str(failed.value)
    assert "ChildFailedError" not in str(failed.value)
    panel = panel_of(launcher)
    assert launcher.state == "failed" and usable(panel) == ["Continue", "Start over"]
    assert cause in panel.alert.value.replace("&#x27;", "'") and 'role="alert"' in panel.alert.value
    assert panel.fold.display == "" and "Iteration 2/2" in panel.log.value


def test_second_press_of_stop_does_not_wait_for_a_save(launch, program, front_end):
    program.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAKE)
    launcher = launch(steps=100_000).start()
    panel = panel_of(launcher)
    wait_until(lambda: steps_done(launcher) > 0, "a step")
    tree = launcher.job.processes()
    panel.buttons["Stop"].click()
    wait_until(lambda: panel.buttons["Stop"].description == "Stop now", "the button says what a second press does")
    assert len(alive(tree)) == 3
    panel.buttons["Stop"].click()
    wait_until(lambda: "stopped" in panel.status.value, "the run is gone")
    assert alive(tree) == [] and panel.buttons["Stop"].description == "Stop"


@pytest.mark.parametrize(("victim", "state", "cause"), [(1, "failed", "SIGKILL"), (0, "lost", "Continue")])
def test_killed_torchrun_or_supervisor_leaves_no_orphans(launch, victim, state, cause):
    launcher = launch(steps=100_000, nproc=2).start()
    # torchrun that is stopped while it starts its workers leaves them; training ends with its parent itself
    wait_until(lambda: (launcher.run_dir / "done1.txt").exists() and steps_done(launcher) > 9, "steps of both")
    tree = launcher.job.processes()
    (agent,) = (p for p in tree if p.ppid() == tree[0].pid and "dfm_nb.base.torchrun" in " ".join(p.cmdline()))
    (tree[0], agent)[victim].kill()
    wait_until(lambda: alive(tree) == [], "the rest is gone", timeout_s=60)
    assert launcher.state == state and cause in launcher.job.cause()


def test_a_running_run_refuses_another_and_stop_or_an_interrupt_ends_the_cell_that_waits(launch, tmp_path, front_end):
    launcher = launch(steps=100_000).start()
    refused(f"process {launcher.job.pid} ", launch(steps=1).start, error=FileExistsError)
    assert launcher.state == "running"
    refused("none", launch(folder="none").resume, error=FileNotFoundError)
    refused(re.escape(str(tmp_path)), workbench.Launcher.attach, tmp_path, error=FileNotFoundError)
    refused("--mock", workbench.Launcher, "run", "--mock a=1")

    async def cell(end):
        waiting = launcher.wait()
        await asyncio.sleep(0.5)
        end(waiting)
        await waiting

    for end in (asyncio.Task.cancel, lambda _: panel_of(launcher).buttons["Stop"].click()):  # the kernel's interrupt
        assert launcher.state == "running"
        with pytest.raises(workbench.RunStopped):
            asyncio.run(cell(end))


@pytest.fixture
def sleeping(tmp_path):
    """A job that sleeps, and its record."""
    job, command = Job(tmp_path / "run"), [sys.executable, "-c", "import time; time.sleep(600)"]
    yield job, {"command": command, "cwd": str(tmp_path), "parent": None}
    job.stop(grace_s=1)


@pytest.mark.parametrize("over", [False, True])
def test_of_two_starters_one_starts_and_the_other_is_refused(sleeping, tmp_path, over):
    job, record = sleeping
    asides = (tmp_path / f"before-{n}" for n in range(9))
    if over:
        job.folder.mkdir()
        (job.folder / "metrics.jsonl").touch()
    with ThreadPoolExecutor() as pool:
        starts = [pool.submit(job.start, record, (lambda: next(asides)) if over else None) for _ in range(4)]
    faults = [str(error) for start in starts if (error := start.exception())]
    assert len(faults) == 3 and all(f"process {job.record['pid']} " in why for why in faults)
    assert job.state == "running" and len(list(tmp_path.glob("before-*"))) == over


def test_a_start_that_came_second_is_no_failure(sleeping, front_end, tmp_path):
    job, record = sleeping
    panel = panel_of(workbench.Launcher(job.folder, ["--mock"]))
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nexit(2)"
    job.start(record | {"command": [sys.executable, "-c", wait]})
    panel._try(lambda: job.start(record))
    assert panel.alert.value == "" and f"rocess {job.pid} " in panel.says.value
    terminal = Run.create(job.folder)
    terminal.claim()
    try:
        (tmp_path / "go").touch()
        wait_until(lambda: not job.record, "the supervisor withdraws its record")
        assert job.state == "running" and job.pid == os.getpid()
    finally:
        terminal.release()


def test_a_run_that_begins_is_of_this_machine(sleeping, front_end, monkeypatch):
    """Another notebook looks at it before its supervisor has written its own record."""
    job, record = sleeping
    panel = panel_of(workbench.Launcher(job.folder, ["--mock"]))
    panel.message = "what was tried before"
    start = process.start

    def looked(*words, **how):
        assert job.state != "running" and Run(job.folder).doubt(supervisor.RECORD) == ""
        return start(*words, **how)

    monkeypatch.setattr(process, "start", looked)
    job.start(record)
    panel.refresh()
    assert panel.message == "" and panel.alert.value == ""
    panel.message = "what was tried meanwhile"
    panel.refresh()
    assert panel.message in panel.alert.value


def test_a_supervisor_ends_the_record_of_its_own_folder(sleeping, tmp_path):
    """Also when the folder was moved, and another run is where it was."""
    job, record = sleeping
    job.start(record)
    moved = Job(job.folder.rename(tmp_path / "moved"))
    job.start(record)
    moved.stop()
    assert moved.state == "stopped" and job.state == "running"


def planted(folder: Path, **record) -> Path:
    """A run folder as somebody else may send it."""
    folder.mkdir()
    told = {"program": "dfm_nb.train", "argv": ["--mock"], "nproc": 1, "exit_code": 1, "host": socket.gethostname()}
    write_json(folder / "launch.json", {**told, "inode": folder.stat().st_ino, **record})
    return folder


def test_resume_runs_nothing_that_a_foreign_folder_names(tmp_path, program):
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')")
    foreign = {"program": {"program": str(evil)}, "module": {"program": "http.server"}, "host": {"host": "elsewhere"}}
    foreign |= {"copied": {"inode": 1}, "terminal": {}}
    folders = [planted(tmp_path / name, **record) for name, record in foreign.items()]
    (folders[-1] / "launch.json").rename(folders[-1] / "config.yaml")
    for folder in folders:
        launcher = workbench.Launcher.attach(folder)
        refused("dfm_nb.base.torchrun", launcher.resume)
        panel = panel_of(launcher)
        for name in ("Continue", "Start over"):
            panel.buttons[name].click()
        assert launcher.state != "running" and panel.alert.value
    assert not (tmp_path / "PWNED").exists()
    assert workbench.Launcher.attach(planted(tmp_path / "ours")).doubt == ""


@pytest.mark.parametrize("given", ["folder", "record", "copied"])
def test_stop_asks_before_it_ends_what_a_foreign_record_names(tmp_path, front_end, given_away, given):
    other = subprocess.Popen(["sleep", "600"])
    began = psutil.Process(other.pid).create_time()
    named = {"pid": other.pid, "started_s": began, "since_boot_s": began - psutil.boot_time(), "exit_code": None}
    folder = planted(tmp_path / "run", **named, **({"inode": 1} if given == "copied" else {}))
    if given != "copied":
        given_away(folder if given == "folder" else folder / "launch.json")
    launcher = workbench.Launcher(folder, ["--mock"])
    stop = panel_of(launcher).buttons["Stop"]
    stop.click()
    assert launcher.state == "running" and "sleep 600" in panel_of(launcher).alert.value
    refused(str(other.pid), launcher.stop, error=NotOurs)
    stop.click()
    other.wait(60)
    assert launcher.state != "running"


def test_a_log_of_somebody_else_is_not_continued(tmp_path):
    (tmp_path / "notes").write_text("mine")
    planted(tmp_path / "linked").joinpath("launch.log").symlink_to(tmp_path / "notes")
    planted(tmp_path / "theirs").joinpath("launch.json").rename(tmp_path / "theirs/launch.log")
    for name in ("theirs", "linked"):
        refused(f"{name}/launch.log", workbench.Launcher(tmp_path / name, ["--mock"]).start, error=FileExistsError)
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("record", [{"pid": [1], "host": 5}, {"argv": [1, {}]}, {"exit_code": "0"}], ids=str)
def test_a_damaged_record_counts_as_none(tmp_path, record):
    job = Job(planted(tmp_path / "run", **record))
    assert job.record == {} and job.state == "not started" and job.pid is None and job.output() == ""


TERMINAL = """
import pathlib, signal, sys, time
from dfm_nb.base.run import Run
run = Run.create(sys.argv[1])
run.claim()
run.config_file.write_text("train:\\n  train_iters: 9\\n")
signal.signal(signal.SIGTERM, lambda *_: (run.release(), sys.exit(0)))
print("ready", flush=True)
time.sleep(600)
"""


def test_run_started_in_a_terminal_is_found_stopped_and_resumable(tmp_path):
    run = tmp_path / "run"
    trainer = subprocess.Popen([sys.executable, "-c", TERMINAL, str(run)], stdout=subprocess.PIPE, text=True)
    trainer.stdout.readline()
    launcher = workbench.Launcher.attach(run)
    assert launcher.state == "running" and launcher.job.pid == trainer.pid and not launcher.can_resume
    launcher.stop()
    assert trainer.wait(5) == 0
    assert launcher.can_resume and launcher.difference() == ""
    refused("terminal", workbench.Launcher(run, ["--mock"]).start)
    assert launcher.command[-4:] == ["--config-file", str(run / "config.yaml"), "--run-dir", str(run)]


@pytest.mark.parametrize("headless", ["0", "1"])
def test_run_outlives_its_kernel_unless_it_is_headless(tmp_path, program, headless):
    """An interrupt, too, reaches the whole group of processes of a kernel."""
    folder = tmp_path / "run"
    code = f"""
        import time, workbench
        workbench.Launcher({str(folder)!r}, [{str(folder)!r}, 100000, "child"], program={str(program)!r}).start()
        print("started", flush=True)
        time.sleep(600)
    """
    words, env = [sys.executable, "-c", textwrap.dedent(code)], {**os.environ, "DFM_HEADLESS": headless}
    kernel = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)
    kernel.stdout.readline()
    job = Job(folder)
    wait_until(lambda: len(job.processes()) == 4, "supervisor, torchrun, worker and its child")
    tree = job.processes()
    os.killpg(kernel.pid, signal.SIGKILL)
    kernel.wait()
    if headless == "0":
        again = workbench.Launcher.attach(folder)
        assert again.state == "running" and len(alive(tree)) == 4
        again.stop()
        assert again.state == "stopped" and again.job.cause() == ""
    wait_until(lambda: alive(tree) == [], "nothing is left behind")


def test_buttons_start_stop_and_continue_and_say_what_they_do(launch, front_end):
    launcher = launch(steps=100_000)
    panel = panel_of(launcher)
    assert usable(panel) == ["Start"]
    panel.buttons["Continue"].click()
    assert launcher.state == "not started", "a button that makes no sense does nothing"
    panel.buttons["Start"].click()
    wait_until(lambda: "running" in panel.status.value and usable(panel) == ["Stop"], "the panel follows the run")
    wait_until(lambda: "Iteration" in panel.log.value, "log lines are shown")
    tree, pid = launcher.job.processes(), launcher.job.pid
    panel.buttons["Start"].click()
    assert launcher.job.pid == pid and panel.alert.value == "", "the second click of a double click is no failure"
    panel.buttons["Stop"].click()
    wait_until(lambda: "stopped" in panel.status.value, "the panel shows the stop")
    wait_until(lambda: usable(panel) == ["Continue", "Start over"], "it can go on")
    assert alive(tree) == []
    reached = steps_done(launcher)
    panel.buttons["Continue"].click()
    wait_until(lambda: steps_done(launcher) > reached, "it goes on")


def test_the_log_of_a_training_is_folded(tmp_path):
    assert panel_of(workbench.Launcher(tmp_path / "run", ["--mock"])).fold.display == "none"
    assert panel_of(workbench.Launcher(tmp_path / "data", program=PREPARE)).fold.display == ""


def test_a_batch_page_tells_the_end(launch, monkeypatch):
    shown = []
    display = SimpleNamespace(update=lambda bundle, raw: shown.append(bundle["text/plain"]))
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: display)
    launcher = launch(steps=2, folder="batch")
    launcher._ipython_display_()
    launcher.start().wait()
    assert "state='running'" in shown[0] and "state='finished'" in shown[-1]


def test_another_command_goes_on_or_starts_over_when_it_is_told(launch, front_end, monkeypatch, tmp_path):
    launch(steps=3).start()
    asyncio.run(awaited(launch(steps=3)))
    other = launch(steps=6).start()
    panel = panel_of(other)
    assert other.state == "finished" and steps_done(other) == 3, "nothing was started"
    assert "3 -&gt; 6" in panel.says.value and usable(panel) == ["Continue", "Start over"]

    async def cell():
        waiting = other.wait()
        await asyncio.sleep(1.0)
        assert not waiting.done(), "Run All waits for a button"
        panel.buttons["Continue"].click()
        await waiting

    asyncio.run(cell())
    assert steps_done(other) == 6 and usable(panel) == ["Start over"] and "run-before-1" in panel.says.value
    panel.buttons["Start over"].click()
    asyncio.run(awaited(other))
    assert steps_done(other) == len((tmp_path / "run-before-1/metrics.jsonl").read_text().splitlines()) == 6
    monkeypatch.setenv("DFM_HEADLESS", "1")
    refused("6 -> 8", launch(steps=8).start)


def test_preparation_with_other_settings_can_only_start_over(tmp_path):
    supervisor.write_record(tmp_path, {"argv": ["--limit", "5"], "program": PREPARE, "exit_code": 0})
    launcher = workbench.Launcher(tmp_path, ["--limit", "7", "--resume"], program=PREPARE)
    assert "--limit 5 -> --limit 7" in launcher.difference() and list(launcher.offers()) == ["Start over"]


def test_a_countdown_starts_the_run_unless_stop_ends_it(launch, front_end):
    async def stopped(launcher):
        waiting = launcher.wait(start_in_s=1)
        await asyncio.sleep(0.5)
        assert usable(launcher._panel) == ["Start", "Stop"]
        launcher._panel.buttons["Stop"].click()
        await asyncio.sleep(1)
        waiting.cancel()
        await waiting

    launcher = launch(steps=2)
    with pytest.raises(workbench.RunStopped):
        asyncio.run(stopped(launcher))
    assert launcher.state == "not started" and steps_done(launcher) == 0
    launcher.wait(start_in_s=0.2)
    assert launcher.state == "finished" and launcher._panel.attention.text == ""
