"""Start, stop and continue a torchrun job from a notebook, never inside the kernel's process.

The run survives a kernel restart, and `Launcher.attach` finds it again; Stop leaves no process. A folder that holds
another command's run is not resumed without confirmation. Headless, `wait` blocks, prints progress and raises
`RunFailed` with the run's own error, and the run ends with the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shlex
import time
from pathlib import Path
from typing import Any, Callable, Sequence

from dfm_nb.base.files import MOST_BYTES, local
from dfm_nb.base.log import is_headless
from dfm_nb.base.run import IDENTITY, Run, iteration_folders
from dfm_nb.base.torchrun import torchrun_argv
from dfm_nb.experiments.runs import ended_in_terminal
from workbench.job import Job, Record, RunEnded, RunFailed, State, clean_lines
from workbench.launcher_panel import LOOK_S, Panel
from workbench.live import Live
from workbench.supervisor import RECORD

TRAINER = "dfm_nb.train"
PREPARE = "dfm_nb.prepare"
DRIVERS = (TRAINER, PREPARE, "dfm_nb.generate", "dfm_nb.evaluate")
ELSEWHERE = ("checkpoint.checkpoint_dir=", "checkpoint.load=", "checkpoint.load_checkpoint=")
"""Settings that start a run from something outside its folder."""
HOW = ("--resume", "--overwrite")
"""Flags for existing output; they do not change what a command writes."""


class NotOurs(ValueError):
    """A run folder contains a command that the user has not confirmed."""


class RunStopped(RunEnded):
    """The run that a cell waits for, or the wait, was stopped."""


class Launcher(Live):
    """One run: its command and its folder.

    Parameters
    ----------
    run_dir : where config, metrics, log and checkpoints go; created if missing.
    argv : arguments of the program, for example `["--recipe", "demo", "train.train_iters=100"]`; `--run-dir` is added
        for the trainer.
    nproc : processes on this machine.
    program : module that torchrun runs, or the path of a `.py` file.

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
        cwd: str | Path | None = None,
    ):
        if isinstance(argv, str):
            raise ValueError(f"argv must be a list of arguments; got the text {argv!r}; write argv={argv.split()!r}")
        self.run_dir = local(run_dir).resolve()
        self.argv = list(map(str, argv))
        self.nproc = nproc
        self.program = program
        self.trains = program == TRAINER
        self.cwd = Path(cwd or ".").absolute()
        self.job = Job(self.run_dir)
        self._panel: Panel | None = None
        self._attached = False  # whether the command is the folder's, and not the user's
        self.followed = False  # whether the folder's last run was started or seen running from here
        self.waits = False  # whether a cell waits for a button
        self.starts_at = math.inf  # when that cell presses it itself, on the monotonic clock

    @classmethod
    def attach(cls, run_dir: str | Path) -> Launcher:
        """The launcher of a run that was started earlier, here or in a kernel that is gone.

        It starts nothing. A run folder may come from anybody: `resume` asks for confirmation before it runs the
        folder's command, if that is not a program of this package or if the folder was created elsewhere.

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
        # dfm pretrain in a terminal leaves no record: its settings are in the run folder
        argv = record.get("argv", ["--config-file", str(config)])
        nproc = record.get("nproc", 1)
        launcher = cls(folder, argv, nproc, program=record.get("program", TRAINER), cwd=record.get("cwd"))
        launcher._attached = True
        return launcher

    @property
    def doubt(self) -> str:
        """Why the run in the folder may be somebody else's, so that its command, and Stop, must be confirmed."""
        if self.state == "not started" and not Run(self.run_dir).config_file.exists():
            return ""
        return Run(self.run_dir).doubt(RECORD if self.job.record else IDENTITY)

    # ---- the command ----------------------------------------------------------------------------------------------

    @property
    def command(self) -> list[str]:
        """The command that Start runs."""
        return self._command(self.argv)

    def _command(self, argv: Sequence[str]) -> list[str]:
        words = list(argv)
        if self.trains:
            words += ["--run-dir", str(self.run_dir)]
        return torchrun_argv(self.program, words, self.nproc)

    @property
    def state(self) -> State:
        state = self.job.state
        self.followed = self.followed or (state == "running" and not self.difference())
        return ended_in_terminal(self.run_dir) if state == "not started" else state

    def difference(self) -> str:
        """How this command differs from the folder's last one, as a sentence; "" if it does not."""
        record = self.job.record
        if not record:
            config = Run(self.run_dir).config_file
            if self.trains and config.exists() and str(config) not in self.argv:
                return "this folder holds a run that was started in a terminal"
            return ""
        changes = _changes(record.get("argv", []), self.argv)
        nproc = record.get("nproc", 1)
        if nproc != self.nproc:
            changes.append(f"processes {nproc} -> {self.nproc}")
        return f"this folder holds a run with other settings: {', '.join(changes)}" if changes else ""

    def offers(self) -> dict[str, str]:
        """The buttons that make sense now, each with what it will do.

        No run yet: Start. A live run: Stop. After a run: Start over, unless its checkpoints are elsewhere, and
        Continue, unless it has finished and no setting changes. Prepared data belong to one command: for other
        settings they must be prepared again.
        """
        state = self.state
        if state == "running":
            return {"Stop": "saves a checkpoint first" if self.trains else "ends all processes of the run"}
        if not self.can_resume:
            return {"Start": "runs in the background, also when this page is closed"}
        elsewhere = next((word.partition("=")[0] for word in self.argv if word.startswith(ELSEWHERE)), "")
        last = self._checkpointed()
        if not self.trains:
            how = "runs the same command again"
        elif elsewhere:
            how = f"resumes from {elsewhere}"
        elif last:
            how = f"resumes after iteration {last}"
        else:
            how = "starts at iteration 1, because there is no checkpoint"
        offers = {}
        if not self.difference():
            if state != "finished":
                offers["Continue"] = how
        elif self.program != PREPARE:
            offers["Continue"] = f"{how}, with the new settings"
        if self.program == PREPARE:
            offers["Start over"] = "deletes the prepared data and prepares them again"
        elif not elsewhere:
            offers["Start over"] = f"moves this run to {self._aside().name} and begins again"
        return offers

    def _checkpointed(self) -> int:
        """The newest checkpoint's iteration, 0 if there is none."""
        folders = iteration_folders(Run(self.run_dir).checkpoints)
        return folders[-1][0] if folders else 0

    def _aside(self) -> Path:
        n = 0
        while True:
            n += 1
            path = self.run_dir.with_name(f"{self.run_dir.name}-before-{n}")
            if not path.exists():
                return path

    def start(self, confirm: bool = False) -> Launcher:
        """Start the run in the background, or resume it if the folder holds a run of the same command.

        With a front end, nothing starts in a folder that holds another command's run: the widget shows the difference
        and waits for Continue or Start over.

        Parameters
        ----------
        confirm : run `command` although the folder is another's or of elsewhere, or its program not of this package.

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
        """Resume from the newest checkpoint of the run folder with this command, whether or not it is the same.

        Parameters, errors : as `start`, and FileNotFoundError if there is nothing to resume.
        """
        if self.state != "running" and not self.can_resume:
            raise FileNotFoundError(f"{self.run_dir} holds no run to resume; use start()")
        return self._launch(self.argv, confirm)

    def start_over(self, confirm: bool = False) -> Launcher:
        """Move the run to the folder `NAME-before-1` next to it, and begin again; prepared data are overwritten.

        Parameters, errors : as `start`.
        """
        if self.program == PREPARE:
            argv = [word for word in self.argv if word != "--resume"]
            return self._launch([*argv, "--overwrite"], confirm)
        return self._launch(self.argv, confirm, aside=True)

    def _launch(self, argv: Sequence[str], confirm: bool, aside: bool = False) -> Launcher:
        doubt = self.doubt if self._attached else ""  # otherwise the command is the user's own
        if self._attached and self.program not in DRIVERS:
            doubt = f"{self.run_dir} names a program that is not one of {', '.join(DRIVERS)}"
        if doubt and not confirm:
            raise NotOurs(f"{doubt}; if you trust it, confirm that this may run: {shlex.join(self.command)}")
        record: Record = {
            "argv": self.argv,
            "nproc": self.nproc,
            "program": self.program,
            "cwd": str(self.cwd),
            "command": self._command(argv),
            "parent": os.getpid() if is_headless() else None,
        }
        self.job.start(record, self._aside if aside and self.run_dir.exists() else None)
        self.followed = True
        self._refresh()
        return self

    @property
    def can_resume(self) -> bool:
        return self.job.pid is None and (bool(self.job.record) or Run(self.run_dir).config_file.exists())

    def stop(self, confirm: bool = False) -> Launcher:
        """End the run and all its processes; a training run saves first. Blocks until they are gone.

        Parameters
        ----------
        confirm : also end the process that the record of another's folder names. Errors : `NotOurs` without.
        """
        doubt = "" if confirm else self.doubt
        running = self.job.processes() if doubt else []
        if running:
            process = f"{running[0].pid} {shlex.join(running[0].cmdline())}"
            raise NotOurs(f"{doubt}; confirm that this process may be ended: {process}")
        self.job.stop()
        self._refresh()
        return self

    def wait(self, until: Callable[[], bool] = lambda: False, start_in_s: float = math.inf) -> Any:
        """Wait until this launcher's run has ended; a finished run of the same command counts.

        In a notebook, use `await launcher.wait()`; with a front end it also waits for a button if nothing runs.
        Without an event loop, as in a script, it blocks. Headless it prints the log.

        Parameters
        ----------
        until : called while the run is live; when it returns True, the wait ends and the run continues.
        start_in_s : seconds after which the wait calls `start`, unless the folder holds another command's run; a
            button ends the countdown. Headless it starts at once. By default it does not start.

        Raises
        ------
        RunFailed : the run failed; the message ends with its own error.
        RunStopped : the run was stopped, or with a front end the wait, so that Run All does not use a partial result.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._wait(until, start_in_s))
        return asyncio.ensure_future(self._wait(until, start_in_s))

    async def _wait(self, until: Callable[[], bool], start_in_s: float) -> None:
        if is_headless() and start_in_s < math.inf and self.state != "running" and not self.followed:
            self.start()
        try:
            await self._end(until, start_in_s)
        finally:
            self.waits = False
            self.starts_at = math.inf
            self._refresh()

    async def _end(self, until: Callable[[], bool], start_in_s: float) -> None:
        headless = is_headless()
        offset = self.job.record.get("log_offset_bytes", 0)
        while True:
            state = self.state  # before the log, so that its last lines are never lost
            running = state == "running"
            if headless:
                offset += self._print_lines(offset, to_the_end=not running)
            # leftovers of another command or of an earlier failure do not end the wait
            ours = headless or self.followed or (state == "finished" and not self.difference())
            if ours and not running:
                return self._finish()
            if ours and until():
                return None
            if not (self.waits or running):
                self._ask(start_in_s)
            if time.monotonic() > self.starts_at and not running:
                self.starts_at = math.inf
                with contextlib.suppress(FileExistsError):  # another kernel was first, or the loop asks again
                    self.start()
            elif self.starts_at < math.inf:
                self._refresh()
            try:
                await asyncio.sleep(LOOK_S)
            except asyncio.CancelledError:  # an interrupt
                now = "the run continues, and Stop ends it" if running else "nothing was started"
                if headless:
                    self.stop()
                    now = "the run was stopped"
                raise RunStopped(f"this cell no longer waits; {now}") from None

    def _ask(self, start_in_s: float) -> None:
        """Show at the buttons that a cell waits for one of them."""
        if self._panel is None:
            self._ipython_display_()
        self.waits = True
        if not self.difference():
            self.starts_at = time.monotonic() + start_in_s
        self._refresh()

    def asks(self) -> str:
        """What a cell that waits asks for; "" if none does."""
        if not self.waits or self.state == "running":
            return ""
        text = f"A cell waits: press {' or '.join(self.offers())}"
        if self.starts_at < math.inf:
            left_s = max(0.0, self.starts_at - time.monotonic())
            text += f", or wait {left_s:.0f} s; Stop ends the countdown"
        return text

    def _print_lines(self, offset: int, to_the_end: bool) -> int:
        """Print the complete lines of the log after `offset`; returns their size in bytes."""
        text = self.job.written(offset, MOST_BYTES)
        if not to_the_end:
            text = text[: text.rfind(b"\n") + 1]
        for line in clean_lines(text.decode(errors="replace")):
            print(line, flush=True)
        return len(text)

    def _finish(self) -> None:
        from workbench import monitor

        self._refresh()
        monitor.finish(self.run_dir)
        if self.state in ("failed", "lost", "not started"):  # the last: nothing was written
            job = self.job
            end = f"the run in {job.folder} ended with exit code {job.record.get('exit_code')} (see {job.log})"
            tail = "\n    ".join([end, *job.tail(15).splitlines()])
            raise RunFailed(f"{tail}\n{job.cause()}")
        if self.state == "stopped":
            last = self._checkpointed()
            at = f" after iteration {last}" if last else ""
            raise RunStopped(f"the run in {self.run_dir} was stopped{at}; press Continue, and run this cell again")

    # ---- the widget -----------------------------------------------------------------------------------------------

    @property
    def widget(self) -> Any:
        """The buttons with their effects, the state, the last log lines, and on failure the cause."""
        if self._panel is None:
            self._panel = Panel(self)
        return self._panel.box

    def _refresh(self) -> None:
        if self._panel is None:
            self.keep()  # in a batch page the cell's line is all that there is
        else:
            self._panel.refresh()

    def kept_html(self) -> str:
        return self._panel.html() if self._panel else ""

    def __repr__(self) -> str:
        return f"Launcher({str(self.run_dir)!r}, state={self.state!r}, pid={self.job.pid})"


def _changes(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """What of two command lines differs, if anything does.

    >>> _changes(["--limit", "5", "a.b=1"], ["--limit", "7", "a.b=1", "--mock"])
    ['--limit 5 -> --limit 7 --mock']
    """
    old = _settings(before)
    new = _settings(now)
    gone = [word for word in old if word not in new]
    come = [word for word in new if word not in old]
    if old == new:
        return []
    if not gone and not come:  # another order, in which another setting may be the last
        gone, come = old, new
    return [f"{' '.join(gone) or 'nothing'} -> {' '.join(come) or 'nothing'}"]


def _settings(argv: Sequence[str]) -> list[str]:
    """The words of a command line without those of `HOW`, each flag as one with its value."""
    words = "\0".join(word for word in argv if word not in HOW)
    return re.sub("(--[^\0=]+)\0(?!--)", r"\1 ", words).split("\0")
