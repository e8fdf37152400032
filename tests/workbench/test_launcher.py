"""The launcher: starts, finds again, stops whole trees, says why a run failed; with a small program under torchrun."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import workbench
from tests.processes import alive, wait_until
from workbench import supervisor
from workbench.job import Job, RunFailed
from workbench.launcher import PREPARE
from workbench.launcher import _words as launcher_words

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
if ending == "raise":
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
        made.append(
            workbench.Launcher(run, [run, steps, ending], nproc, program=str(program), cwd=tmp_path, **settings)
        )
        return made[-1]

    yield make
    for launcher in made:
        launcher.job.stop(grace_s=1)


def steps_done(launcher) -> int:
    path = launcher.run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_headless_wait_blocks_and_prints_progress(launch, capsys):
    launcher = launch(steps=6)
    launcher.start()
    assert launcher.state == "running"
    launcher.wait()
    assert launcher.state == "finished" and launcher.job.record["exit_code"] == 0
    printed = capsys.readouterr().out
    assert [f"[INFO] Iteration {i}/6" in printed for i in range(1, 7)] == [True] * 6


def test_wait_can_be_awaited_headless(launch):
    async def cell():
        await launch(steps=2).start().wait()

    asyncio.run(cell())


def test_wait_in_a_front_end_leaves_the_loop_free(launch, monkeypatch):
    monkeypatch.setenv("DFM_HEADLESS", "0")
    launcher, ticks = launch(steps=30).start(), []

    async def tick():
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.02)

    async def cell():
        ticking = asyncio.create_task(tick())
        await launcher.wait()
        ticking.cancel()

    asyncio.run(cell())
    assert launcher.state == "finished"
    assert max(b - a for a, b in zip(ticks, ticks[1:])) < 1.0


@pytest.mark.parametrize(
    "ending, cause",
    [
        ("raise", "KeyError: 'the sample has no caption'"),
        ("mistake", "--limit must be at least 1; got 0"),
        ("killed", "a process was ended by SIGKILL; the machine may have run out of memory"),
    ],
)
def test_failing_run_raises_its_own_error_last(launch, ending, cause):
    launcher = launch(steps=2, ending=ending).start()
    with pytest.raises(RunFailed) as failed:
        launcher.wait()
    assert str(failed.value).splitlines()[-1] == cause
    assert "[INFO] Iteration 2/2" in str(failed.value)
    assert "ChildFailedError" not in str(failed.value)
    assert launcher.state == "failed"
    launcher.widget  # noqa: B018
    assert cause in launcher._panel.alert.value.replace("&#x27;", "'") and 'role="alert"' in launcher._panel.alert.value
    assert usable(launcher._panel) == ["Continue", "Start over"]


def test_stop_leaves_no_process_of_any_depth(launch):
    launcher = launch(steps=100_000, ending="child", nproc=2, grace_s=5.0).start()
    wait_until(lambda: len(launcher.job.processes()) == 6, "supervisor, torchrun, 2 workers, 2 children of theirs")
    wait_until(lambda: steps_done(launcher) > 0, "a step")
    tree = launcher.job.processes()
    launcher.stop()
    assert alive(tree) == []
    assert launcher.state == "stopped" and launcher.job.record["stopped"] is True
    assert launcher.job.cause() == ""


def test_stop_kills_what_ignores_the_request(launch, program):
    program.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAKE)
    launcher = launch(steps=100_000, grace_s=1.0).start()
    wait_until(lambda: steps_done(launcher) > 0, "a step")
    tree = launcher.job.processes()
    launcher.stop()
    assert alive(tree) == [] and launcher.state == "stopped"


def test_second_press_of_stop_does_not_wait_for_a_save(launch, program, monkeypatch):
    monkeypatch.setenv("DFM_HEADLESS", "0")
    program.write_text("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAKE)
    launcher = launch(steps=100_000, grace_s=600.0).start()
    launcher.widget  # noqa: B018
    panel = launcher._panel
    wait_until(lambda: steps_done(launcher) > 0, "a step")
    tree = launcher.job.processes()
    panel.buttons["Stop"].click()
    wait_until(lambda: panel.buttons["Stop"].description == "Stop now", "the button says what a second press does")
    assert "saving, then ending" in panel.status.value and len(alive(tree)) == 3
    panel.buttons["Stop"].click()
    wait_until(lambda: "stopped" in panel.status.value, "the run is gone")
    assert alive(tree) == [] and panel.buttons["Stop"].description == "Stop"


def test_killed_torchrun_leaves_no_orphans(launch):
    launcher = launch(steps=100_000, nproc=2).start()
    wait_until(lambda: steps_done(launcher) > 0, "a step")
    tree = launcher.job.processes()
    agent = next(p for p in tree if "torch.distributed.run" in " ".join(p.cmdline()) and p.ppid() == tree[0].pid)
    agent.kill()
    wait_until(lambda: alive(tree) == [], "the workers of the killed torchrun are gone")
    assert launcher.state == "failed" and "SIGKILL" in launcher.job.cause()


def test_killed_supervisor_takes_the_run_with_it(launch):
    launcher = launch(steps=100_000).start()
    wait_until(lambda: steps_done(launcher) > 0, "a step")
    tree = launcher.job.processes()
    tree[0].kill()
    wait_until(lambda: alive(tree) == [], "torchrun and its worker are gone")
    assert launcher.state == "lost" and "Continue" in launcher.job.cause()


def test_resume_runs_the_same_command_and_goes_on(launch):
    launcher = launch(steps=60).start()
    wait_until(lambda: steps_done(launcher) >= 3, "three steps")
    launcher.stop()
    reached = steps_done(launcher)
    assert 3 <= reached < 60
    workbench.Launcher.attach(launcher.run_dir).resume(confirm=True).wait()  # a program of our own, not a driver
    iterations = [
        json.loads(line)["iteration"] for line in (launcher.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert iterations[-1] == 60 and len(iterations) <= 61 and sorted(set(iterations)) == list(range(1, 61))


def test_start_refuses_a_second_run_in_the_folder(launch):
    launcher = launch(steps=100_000).start()
    with pytest.raises(FileExistsError, match=f"process {launcher.pid} already runs in"):
        launch(steps=1).start()
    assert launcher.state == "running"


def test_resume_of_nothing_names_the_folder(launch):
    with pytest.raises(FileNotFoundError, match="holds no run to resume; use start"):
        launch(folder="none").resume()


def test_attach_to_nothing_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing was started in"):
        workbench.Launcher.attach(tmp_path)


def planted(folder: Path, **record) -> Path:
    """A run folder as somebody else may send it."""
    folder.mkdir()
    told = {"program": "dfm_nb.train", "argv": ["--mock"], "nproc": 1, "exit_code": 1, "host": socket.gethostname()}
    (folder / "launch.json").write_text(json.dumps({**told, "inode": folder.stat().st_ino, **record}))
    return folder


def test_resume_runs_nothing_that_a_foreign_folder_names(tmp_path, program):
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')")
    folders = [
        planted(tmp_path / "program", program=str(evil)),
        planted(tmp_path / "module", program="http.server"),
        planted(tmp_path / "host", host="elsewhere"),
        planted(tmp_path / "copied", inode=1),
    ]
    for folder in folders:
        launcher = workbench.Launcher.attach(folder)
        with pytest.raises(ValueError, match="if you trust it, confirm that this may run: .*torch.distributed.run"):
            launcher.resume()
        launcher.widget  # noqa: B018
        for name in ("Continue", "Start over"):
            launcher._panel.buttons[name].click()
        assert launcher.state != "running" and "if you trust it" in launcher._panel.alert.value
    assert not (tmp_path / "PWNED").exists()
    ours = workbench.Launcher.attach(planted(tmp_path / "ours"))
    assert ours._doubt is None


@pytest.mark.parametrize(
    "record",
    [
        {"pid": "7"},
        {"pid": [1], "host": 5},
        {"nproc": "many"},
        {"nproc": {}},
        {"argv": "--mock"},
        {"argv": [1, {}]},
        {"grace_s": "long"},
        {"program": 3},
        {"cwd": 4},
        {"log_offset_bytes": "a"},
        {"started_s": "x", "pid": 1},
        {"exit_code": "0"},
        {"command": 5},
    ],
    ids=str,
)
def test_a_damaged_record_counts_as_none(tmp_path, record):
    folder = planted(tmp_path / "run", **record)
    job = Job(folder)
    assert job.record == {} and job.state == "not started" and job.pid is None and job.output() == ""
    with pytest.raises(FileNotFoundError, match="nothing was started in"):
        workbench.Launcher.attach(folder)


TERMINAL = """
import pathlib, signal, sys, time
from dfm_nb.base.run import Run
run = Run.create(sys.argv[1])
run.claim()
run.save_config("train:\\n  train_iters: 9\\n")
signal.signal(signal.SIGTERM, lambda *_: (run.release(), sys.exit(0)))
print("ready", flush=True)
time.sleep(600)
"""


def test_run_started_in_a_terminal_is_found_stopped_and_resumable(tmp_path):
    run = tmp_path / "run"
    trainer = subprocess.Popen([sys.executable, "-c", TERMINAL, str(run)], stdout=subprocess.PIPE, text=True)
    trainer.stdout.readline()
    launcher = workbench.Launcher.attach(run)
    assert launcher.state == "running" and launcher.pid == trainer.pid and not launcher.can_resume
    with pytest.raises(FileExistsError, match=f"process {trainer.pid} already runs"):
        launcher.start()
    launcher.stop()
    assert trainer.wait(5) == 0
    assert launcher.can_resume and launcher.difference() == ""
    other = workbench.Launcher(run, ["--mock"])
    assert other.difference() == "this folder holds a run that was started in a terminal"
    with pytest.raises(ValueError, match="started in a terminal; choose another folder"):
        other.start()
    assert launcher.command[-4:] == ["--config-file", str(run / "config.yaml"), "--run-dir", str(run)]


def start_elsewhere(tmp_path: Path, program: Path, headless: str) -> subprocess.Popen:
    """Another Python process that starts a run and then waits to be killed, as a kernel is."""
    code = f"""
        import time, workbench
        folder = {str(tmp_path / "run")!r}
        run = workbench.Launcher(folder, [folder, 100000, "well"], program={str(program)!r})
        run.start()
        print(run.pid, flush=True)
        time.sleep(600)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "DFM_HEADLESS": headless},
    )


def test_run_survives_its_kernel_and_is_found_again(tmp_path, program):
    kernel = start_elsewhere(tmp_path, program, headless="0")
    pid = int(kernel.stdout.readline())
    kernel.send_signal(signal.SIGKILL)
    kernel.communicate()
    launcher = workbench.Launcher.attach(tmp_path / "run")
    assert launcher.state == "running" and launcher.pid == pid
    assert launcher.argv[1:] == ["100000", "well"]
    before = steps_done(launcher)
    wait_until(lambda: steps_done(launcher) > before, "the run goes on")
    launcher.widget  # noqa: B018
    assert usable(launcher._panel) == ["Stop"]
    tree = launcher.job.processes()
    launcher.stop()
    assert alive(tree) == [] and launcher.state == "stopped"


def test_headless_run_ends_with_its_kernel(tmp_path, program):
    kernel = start_elsewhere(tmp_path, program, headless="1")
    kernel.stdout.readline()
    job = Job(tmp_path / "run")
    wait_until(lambda: len(job.processes()) == 3, "supervisor, torchrun, worker")
    tree = job.processes()
    kernel.send_signal(signal.SIGKILL)
    kernel.communicate()
    wait_until(lambda: alive(tree) == [], "nothing is left behind")


def test_reused_pid_is_not_taken_for_the_run(tmp_path):
    record = {"pid": os.getpid(), "host": os.uname().nodename, "started_s": 1.0, "exit_code": None}
    supervisor.write_json(tmp_path / "launch.json", record)
    assert Job(tmp_path).pid is None and Job(tmp_path).state == "lost"


def usable(panel) -> list[str]:
    return [name for name, button in panel.buttons.items() if not button.disabled]


def panel_of(launcher):
    launcher.widget  # noqa: B018
    return launcher._panel


@pytest.fixture
def front_end(monkeypatch):
    monkeypatch.setenv("DFM_HEADLESS", "0")


def test_buttons_start_stop_and_continue_and_say_what_they_do(launch, front_end):
    launcher = launch(steps=100_000)
    panel = panel_of(launcher)
    assert usable(panel) == ["Start"] and "<b>Start</b> runs in the background" in panel.says.value
    panel.buttons["Continue"].click()
    assert launcher.state == "not started", "a button that makes no sense does nothing"
    panel.buttons["Start"].click()
    wait_until(lambda: "running" in panel.status.value and usable(panel) == ["Stop"], "the panel follows the run")
    wait_until(lambda: "Iteration" in panel.log.value, "log lines are shown")
    tree, pid = launcher.job.processes(), launcher.pid
    panel.buttons["Start"].click()
    assert launcher.pid == pid and panel.alert.value == "", "the second click of a double click is no failure"
    panel._guarded(launcher.start)
    assert "already runs in" in panel.alert.value
    panel.buttons["Stop"].click()
    wait_until(lambda: "stopped" in panel.status.value, "the panel shows the stop")
    wait_until(lambda: usable(panel) == ["Continue", "Start over"], "it can go on")
    assert alive(tree) == [] and "<b>Continue</b> runs the same command again" in panel.says.value
    reached = steps_done(launcher)
    panel.buttons["Continue"].click()
    wait_until(lambda: steps_done(launcher) > reached, "it goes on")


def test_start_over_moves_the_run_aside(launch, front_end):
    launcher = launch(steps=3).start()
    asyncio.run(awaited(launcher))
    panel = panel_of(launcher)
    assert usable(panel) == ["Start over"] and "moves this run to run-before-1" in panel.says.value
    panel.buttons["Start over"].click()
    asyncio.run(awaited(launcher))
    assert steps_done(launcher) == 3
    assert len((launcher.run_dir.with_name("run-before-1") / "metrics.jsonl").read_text().splitlines()) == 3


async def awaited(launcher):
    await launcher.wait()


def test_folder_of_another_command_says_the_difference_before_anything_runs(launch, front_end, capsys):
    launch(steps=3).start()
    asyncio.run(awaited(launch(steps=3)))
    other = launch(steps=6).start()
    panel = panel_of(other)
    assert other.state == "finished" and steps_done(other) == 3, "nothing was started"
    assert "This folder holds a run with other settings: argument 2 3 -&gt; 6." in panel.says.value
    assert usable(panel) == ["Continue", "Start over"] and "with the new settings" in panel.says.value

    async def cell():
        waiting = other.wait()
        await asyncio.sleep(1.0)
        assert not waiting.done(), "Run All waits for a button"
        panel.buttons["Continue"].click()
        await waiting

    asyncio.run(cell())
    assert steps_done(other) == 6 and other.state == "finished"
    assert "waiting for Continue or Start over: this folder holds a run with other settings" in capsys.readouterr().out


def test_headless_another_command_is_refused(launch):
    launch(steps=2).start().wait()
    with pytest.raises(ValueError, match="other settings: argument 2 2 -> 4; choose another folder"):
        launch(steps=4).start()
    launch(steps=4).resume().wait()
    assert steps_done(launch()) == 4


def test_wait_returns_when_the_same_command_has_finished(launch, front_end):
    asyncio.run(awaited(launch(steps=2).start()))
    began = time.monotonic()
    asyncio.run(awaited(launch(steps=2)))
    assert time.monotonic() - began < 1


def test_stop_ends_the_cell_that_waits(launch, front_end):
    launcher = launch(steps=100_000, grace_s=2.0).start()

    async def cell():
        waiting = launcher.wait()
        await asyncio.sleep(0.5)
        panel_of(launcher).buttons["Stop"].click()
        await waiting

    with pytest.raises(workbench.RunStopped, match="was stopped; press Continue") as stopped:
        asyncio.run(cell())
    assert stopped.value._render_traceback_() == [f"RunStopped: {stopped.value}"]


def test_failure_of_an_earlier_session_is_told_as_past(launch, front_end):
    with pytest.raises(RunFailed):
        asyncio.run(awaited(launch(steps=1, ending="mistake").start()))
    panel = panel_of(launch(steps=1, ending="mistake"))
    assert panel.alert.value == "" and panel.log.value == ""
    assert "The last run here failed on" in panel.says.value and "--limit must be at least 1" in panel.says.value


def test_words_of_a_command_line_are_told_apart():
    argv = [
        "--recipe",
        "demo",
        "--mock",
        "train.train_iters=3",
        "--num_images=5",
        "--resume",
        "--upscale",
        "--limit",
        "2",
    ]
    assert launcher_words(argv) == {
        "--recipe": "demo",
        "--mock": "on",
        "train.train_iters": "3",
        "--num-images": "5",
        "--upscale": "on",
        "--limit": "2",
    }


def test_preparation_with_other_settings_can_only_start_over(tmp_path):
    supervisor.write_json(tmp_path / "launch.json", {"argv": ["--limit", "5"], "program": PREPARE, "exit_code": 0})
    launcher = workbench.Launcher(tmp_path, ["--limit", "7", "--resume"], program=PREPARE)
    assert launcher.difference().endswith("--limit 5 -> 7") and list(launcher.offers()) == ["Start over"]


def test_argv_as_one_text_is_refused():
    with pytest.raises(ValueError, match=r"must be a list of arguments.*\['--mock', 'a=1'\]"):
        workbench.Launcher("run", "--mock a=1")


def test_trainer_command_gets_the_run_folder_once(tmp_path):
    command = workbench.Launcher(tmp_path, ["--mock"], nproc=2).command
    assert command[-4:] == ["dfm_nb.train", "--mock", "--run-dir", str(tmp_path)] and "--nproc-per-node=2" in command
    own = workbench.Launcher(tmp_path, ["--run_dir=elsewhere"]).command
    assert own[-1] == "--run_dir=elsewhere" and "--run-dir" not in own


def test_command_that_cannot_run_is_a_failure(tmp_path):
    job = Job.start(tmp_path, [str(tmp_path / "no-such-program")])
    wait_until(lambda: job.state != "running", "it ends")
    assert job.state == "failed" and "No such file" in job.cause()
