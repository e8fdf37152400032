"""Start, stop and continue a torchrun job from a notebook, never inside the kernel's process.

The run survives a kernel restart, and `Launcher.attach` finds it again; Stop leaves no process. A folder that holds
another command's run is not gone on with unasked. Headless, `wait` blocks, prints progress and raises `RunFailed` with
the run's own error, and the run ends with the kernel.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any, Callable, Generator, Sequence

from dfm_nb.base.files import local
from dfm_nb.base.headless import is_headless
from dfm_nb.base.run import Run
from dfm_nb.base.torchrun import torchrun_argv
from workbench.job import GRACE_S, Job, RunFailed, State
from workbench.launcher_panel import LOOK_S, Panel
from workbench.live import Live
from workbench.outcome import clean_lines

TRAINER, PREPARE = "dfm_nb.train", "dfm_nb.prepare"
DRIVERS = (TRAINER, PREPARE, "dfm_nb.generate", "dfm_nb.evaluate")
ELSEWHERE = ("checkpoint.checkpoint_dir", "checkpoint.load", "checkpoint.load_checkpoint")
"""Settings by which a run begins with what is not in its folder."""
_SETTING = re.compile(r"[A-Za-z_][\w.]*=")


class NotOurs(ValueError):
    """A run folder asks for a command that its reader has not chosen."""


class RunStopped(RuntimeError):
    """The run that a cell waits for, or the wait, was stopped; in a notebook it is one sentence without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class _Done:
    """An awaitable that is done, so that the cell `await launcher.wait()` works headless, too."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield

    def __repr__(self) -> str:
        return ""


class Launcher(Live):
    """One run: its command and its folder.

    Parameters
    ----------
    run_dir : where config, metrics, log and checkpoints go; it is made when missing.
    argv : arguments of the program, for example `["--recipe", "demo", "train.train_iters=100"]`; `--run-dir` is added
        for the trainer.
    nproc : processes on this machine.
    program : module that torchrun runs, or the path of a `.py` file.
    grace_s : seconds that Stop gives the run to save before it kills it.

    >>> run = Launcher("runs/first", ["--mock", "train.train_iters=20"])      # doctest: +SKIP
    >>> run.start(); await run.wait()                                         # doctest: +SKIP
    """

    def __init__(
        self,
        run_dir: str | Path,
        argv: Sequence[object] = (),
        nproc: int = 1,
        *,
        program: str = TRAINER,
        grace_s: float = GRACE_S,
        cwd: str | Path | None = None,
    ):
        if not isinstance(nproc, int) or nproc < 1:
            raise ValueError(f"nproc must be a positive whole number; got {nproc!r}")
        if isinstance(argv, str):
            raise ValueError(f"argv must be a list of arguments; got the text {argv!r}; write argv={argv.split()!r}")
        self.run_dir = local(run_dir).resolve()
        self.argv, self.nproc, self.program, self.grace_s = [str(a) for a in argv], nproc, program, grace_s
        self.cwd = Path(cwd) if cwd else Path.cwd()
        self.job = Job(self.run_dir)
        self._panel: Any = None
        self._doubt: str | None = None  # why what the folder names must be confirmed
        self.followed = False  # whether the folder's last run was started or seen running from here

    @classmethod
    def attach(cls, run_dir: str | Path) -> Launcher:
        """The launcher of a run that was started earlier, here or in a kernel that is gone.

        It looks and starts nothing. A run folder may come from anybody: `resume` asks before it runs what the folder
        names, if that is not a program of this package or if the folder was not made here.

        Raises
        ------
        FileNotFoundError : nothing was started in this folder.
        """
        folder = Path(run_dir).expanduser().resolve()
        job = Job(folder)
        record = job.record
        config = Run(folder).config_file
        if not record and job.pid is None and not config.exists():
            raise FileNotFoundError(f"nothing was started in {folder}; Launcher(run_dir, argv=[...]).start() does")
        in_terminal = ["--config-file", str(config)]  # dfm pretrain by hand: its settings are in the run folder
        out = cls(
            folder,
            record.get("argv", in_terminal),
            int(record.get("nproc", 1)),
            program=record.get("program", TRAINER),
            grace_s=float(record.get("grace_s", GRACE_S)),
            cwd=record.get("cwd"),
        )
        out.job = job
        if out.program not in DRIVERS:
            out._doubt = f"{job.folder} names a program that is not one of {', '.join(DRIVERS)}"
        elif not Run(folder).made_here(record):
            out._doubt = f"{job.folder} was not made here"
        return out

    # ---- the command ----------------------------------------------------------------------------------------------

    @property
    def command(self) -> list[str]:
        """What Start runs."""
        return self._command(self.argv)

    def _command(self, argv: Sequence[str]) -> list[str]:
        if self.program == TRAINER and not any(_is_flag(a, "--run-dir") for a in argv):
            argv = [*argv, "--run-dir", str(self.run_dir)]
        return torchrun_argv(self.program, argv, self.nproc)

    @property
    def state(self) -> State:
        state = self.job.state
        self.followed = self.followed or (state == "running" and not self.difference())
        return state

    @property
    def pid(self) -> int | None:
        return self.job.pid

    def difference(self) -> str:
        """What this command says otherwise than the folder's last, as a sentence; "" when nothing does."""
        record, config = self.job.record, Run(self.run_dir).config_file
        if not record:
            strange = self.program == TRAINER and config.exists() and str(config) not in self.argv
            return "this folder holds a run that was started in a terminal" if strange else ""
        before = _words(record.get("argv", [])) | {"processes": str(record.get("nproc", 1))}
        now = _words(self.argv) | {"processes": str(self.nproc)}
        told = [(name, before.get(name, "not set"), now.get(name, "not set")) for name in {**before, **now}]
        found = ", ".join(f"{name} {old} -> {new}" for name, old, new in told if old != new)
        return f"this folder holds a run with other settings: {found}" if found else ""

    def offers(self) -> dict[str, str]:
        """The buttons that make sense now, each with what it will do."""
        if self.state == "running":
            return {"Stop": "saves a checkpoint first" if self.program == TRAINER else "ends all processes of the run"}
        if not self.can_resume:
            return {"Start": "runs in the background, also when this page is closed"}
        last, changed, out = self._checkpointed(), bool(self.difference()), {}
        elsewhere = [name for name in _words(self.argv) if name in ELSEWHERE]
        if (changed and self.program != PREPARE) or (not changed and self.state != "finished"):
            where = f"goes on after iteration {last}" if last else "runs the same command again"
            if elsewhere:
                where = f"goes on from {elsewhere[0]}"
            elif self.program == TRAINER and not last:
                where = "begins at iteration 1, as there is no checkpoint"
            out["Continue"] = where + (", with the new settings" if changed else "")
        if self.program == PREPARE:
            out["Start over"] = "deletes the prepared data and makes them anew"
        elif not elsewhere:
            out["Start over"] = f"moves this run to {self._aside().name} and begins anew"
        return out

    def _checkpointed(self) -> int:
        """The newest checkpoint's iteration, 0 when there is none."""
        try:
            return int((Run(self.run_dir).checkpoints / "latest_checkpointed_iteration.txt").read_text())
        except (OSError, ValueError):
            return 0

    def _aside(self) -> Path:
        names = (self.run_dir.with_name(f"{self.run_dir.name}-before-{n}") for n in itertools.count(1))
        return next(path for path in names if not path.exists())

    def start(self, confirm: bool = False) -> Launcher:
        """Start the run in the background, or go on with it when the folder holds the same command's.

        With a front end, a folder that holds another command's run starts nothing: the widget says the difference and
        waits for Continue or Start over.

        Parameters
        ----------
        confirm : run `command` although the folder was not made here, or names a program of somebody else.

        Raises
        ------
        FileExistsError : one is running in this folder.
        ValueError : headless, and the folder holds another command's run.
        NotOurs : see `confirm`.
        """
        difference = self.difference() if self.job.pid is None else ""
        if difference and is_headless():
            raise ValueError(f"{difference}; choose another folder than {self.run_dir}, or call resume or start_over")
        if difference:
            self._refresh()
            return self
        return self._launch(self.argv, confirm)

    def resume(self, confirm: bool = False) -> Launcher:
        """Go on from the newest checkpoint of the run folder with this command, whether or not it is the same.

        Parameters, errors : as `start`, and FileNotFoundError where there is nothing to go on from.
        """
        if self.state != "running" and not self.can_resume:
            raise FileNotFoundError(f"{self.run_dir} holds no run to resume; use start()")
        return self._launch(self.argv, confirm)

    def start_over(self, confirm: bool = False) -> Launcher:
        """Move the run to a folder beside it, `NAME-before-1`, and begin anew; prepared data are overwritten instead.

        Parameters, errors : as `start`.
        """
        self._check_ours(confirm)
        if self.program == PREPARE:
            return self._launch([a for a in self.argv if a != "--resume"] + ["--overwrite"], confirm)
        if self.job.pid is None and self.run_dir.exists():
            self.run_dir.rename(self._aside())
        return self._launch(self.argv, confirm)

    def _check_ours(self, confirm: bool) -> None:
        if self._doubt and not confirm:
            raise NotOurs(f"{self._doubt}; if you trust it, confirm that this may run: {shlex.join(self.command)}")

    def _launch(self, argv: Sequence[str], confirm: bool) -> Launcher:
        self._check_ours(confirm)
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.nproc))}
        self.job = Job.start(
            self.run_dir,
            self._command(argv),
            about={"argv": self.argv, "nproc": self.nproc, "program": self.program, "grace_s": self.grace_s},
            grace_s=self.grace_s,
            die_with_parent=is_headless(),
            env={} if "OMP_NUM_THREADS" in os.environ else threads,
            cwd=self.cwd,
        )
        self.followed = True
        self._watch()
        return self

    @property
    def can_resume(self) -> bool:
        return self.state != "running" and (bool(self.job.record) or Run(self.run_dir).config_file.exists())

    def stop(self, grace_s: float | None = None) -> Launcher:
        """End the run with all its processes; once it trains, it saves first. Blocks until they are gone."""
        self.job.stop(grace_s)
        self._refresh()
        return self

    def wait(self, until: Callable[[], bool] = lambda: False) -> Any:
        """Until the run that this launcher asks for has ended; one of the same command may have finished before.

        In a front end: `await launcher.wait()`, which also waits for a button where nothing runs. Headless it blocks
        and prints progress.

        Parameters
        ----------
        until : asked while it runs; when it is true, the wait is over and the run goes on.

        Raises
        ------
        RunFailed : the run failed; its own error ends the message.
        RunStopped : somebody stopped it, or in a front end the wait, so that Run All does not go on with half a result.
        """
        if not is_headless():
            return asyncio.ensure_future(self._wait_async(until))
        self._wait_blocking(until)
        return _Done()

    async def _wait_async(self, until: Callable[[], bool]) -> None:
        asked = False
        while not self._over():
            running = self.state == "running"
            if running and self.followed and until():
                return
            if not asked and not running:
                asked = True
                self._ask()
            try:
                await asyncio.sleep(LOOK_S)
            except asyncio.CancelledError:  # the kernel was interrupted
                raise RunStopped("this cell no longer waits; the run continues, and Stop ends it") from None
        self._finish()

    def _ask(self) -> None:
        """Say which button a waiting cell waits for, below the buttons."""
        if self._panel is None:
            self._ipython_display_()
        why = self.difference()
        print(f"waiting for {' or '.join(self.offers())}" + (f": {why}" if why else ""), flush=True)

    def _over(self) -> bool:
        """Whether what this launcher asks for has ended; what another command, or an earlier failure, left is not."""
        state = self.state
        return state != "running" and (self.followed or (state == "finished" and not self.difference()))

    def _wait_blocking(self, until: Callable[[], bool]) -> None:
        printer = _Printer(self.job)
        try:
            while True:
                running = self.state == "running"  # before the file, so that the tail is never lost
                printer.print_new(final=not running)
                if not running:
                    break
                if until():
                    return
                time.sleep(LOOK_S)
        except KeyboardInterrupt:
            self.stop()
            raise
        self._finish()

    def _finish(self) -> None:
        from workbench import monitor

        self._refresh()
        monitor.finish(self.run_dir)
        if self.state in ("failed", "lost"):
            raise RunFailed(self.failure())
        if self.state == "stopped":
            at = f" after iteration {self._checkpointed()}" if self._checkpointed() else ""
            raise RunStopped(f"the run in {self.run_dir} was stopped{at}; press Continue, and run this cell again")

    def failure(self) -> str:
        """The last log lines and, as the last line, the cause."""
        code = self.job.record.get("exit_code")
        head = (
            f"the run in {self.run_dir} ended with exit code {code}; its last lines ({self.job.folder / 'launch.log'}):"
        )
        tail = "".join(f"\n    {line}" for line in self.job.tail(15).splitlines())
        return f"{head}{tail}\n{self.job.cause()}"

    # ---- the widget -----------------------------------------------------------------------------------------------

    @property
    def widget(self) -> Any:
        """The buttons with what each will do, the state, the last log lines, and on failure the cause."""
        if self._panel is None:
            self._panel = Panel(self)
            self._watch()
        return self._panel.box

    def _refresh(self) -> None:
        if self._panel is not None:
            self._panel.refresh()

    def _watch(self) -> None:
        if self._panel is not None:
            self._panel.watch()

    def kept_html(self) -> str:
        return self._panel.html() if self._panel else super().kept_html()

    def __repr__(self) -> str:
        return f"Launcher({str(self.run_dir)!r}, state={self.state!r}, pid={self.pid})"


def _is_flag(arg: str, flag: str) -> bool:
    return arg.partition("=")[0].replace("_", "-") == flag


def _words(argv: Sequence[str]) -> dict[str, str]:
    """Settings and flags of a command line by name; --resume and --overwrite say how, not what, and are left out."""
    out: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, eq, value = word.partition("=")
        if not word.startswith("--") and not _SETTING.match(word):
            name, value = f"argument {1 + sum(n.startswith('argument') for n in out)}", word
        elif not eq:  # a flag; its value is the next word, unless that is another flag or a setting
            alone = not rest or rest[0].startswith("--") or _SETTING.match(rest[0])
            value = "on" if alone else rest.pop(0)
        name = name.replace("_", "-") if name.startswith("--") else name
        if name not in ("--resume", "--overwrite", "--run-dir"):
            out[name] = value
    return out


class _Printer:
    """Prints whole new lines of a job's log; a redrawn progress bar at most every five seconds."""

    BAR_S = 5.0

    def __init__(self, job: Job):
        self.job, self.offset = job, int(job.record.get("log_offset_bytes", 0))
        self.rest, self.last_bar = "", 0.0

    def print_new(self, final: bool = False) -> None:
        path = self.job.folder / "launch.log"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        self.offset += len(data)
        text = self.rest + data.decode(errors="replace")
        whole, _, self.rest = ("", "", text) if "\n" not in text else text.rpartition("\n")
        if final:
            whole, self.rest = f"{whole}\n{self.rest}", ""
        elif "\r" in self.rest and time.monotonic() - self.last_bar > self.BAR_S:
            whole, self.last_bar = f"{whole}\n{self.rest}", time.monotonic()
            self.rest = ""
        for line in clean_lines(whole):
            print(line, flush=True)
