"""Start, stop and resume a torchrun job from a notebook, never inside the kernel's process.

The run survives a kernel restart, and `Launcher.attach` finds it again; Stop leaves no process. Headless, `wait`
blocks, prints progress and raises `RunFailed` with the run's own error, and the run ends with the kernel.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from pathlib import Path
from typing import Any, Generator, Sequence

from dfm_nb.base.argv import torchrun_argv
from dfm_nb.base.run import Run
from workbench.headless import is_headless
from workbench.job import GRACE_S, Job, RunFailed, State
from workbench.launcher_panel import LOOK_S, Panel
from workbench.outcome import clean_lines, is_report

TRAINER = "dfm_nb.train"
DRIVERS = (TRAINER, "dfm_nb.prepare", "dfm_nb.generate", "dfm_nb.evaluate")


class NotOurs(ValueError):
    """A run folder asks for a command that its reader has not chosen."""


class _Done:
    """An awaitable that is done, so that the cell `await launcher.wait()` works headless, too."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield

    def __repr__(self) -> str:
        return ""


class Launcher:
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
        self.run_dir = Path(run_dir).expanduser().resolve()
        self.argv, self.nproc, self.program, self.grace_s = [str(a) for a in argv], nproc, program, grace_s
        self.cwd = Path(cwd) if cwd else Path.cwd()
        self.job = Job(self.run_dir)
        self._panel: Any = None
        self._doubt: str | None = None  # why `resume` must be confirmed

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
        elif record and not job.made_here:
            out._doubt = f"{job.folder} was not made here"
        return out

    # ---- the command ----------------------------------------------------------------------------------------------

    @property
    def command(self) -> list[str]:
        """What Start runs."""
        argv = list(self.argv)
        if self.program == TRAINER and not any(_is_flag(a, "--run-dir") for a in argv):
            argv += ["--run-dir", str(self.run_dir)]
        if not self.program.endswith(".py"):
            return torchrun_argv(self.program, argv, self.nproc)
        command = torchrun_argv("_", argv, self.nproc)
        at = len(command) - len(argv) - 2
        return [*command[:at], str(Path(self.program).resolve()), *argv]

    @property
    def state(self) -> State:
        return self.job.state

    @property
    def pid(self) -> int | None:
        return self.job.pid

    def start(self) -> Launcher:
        """Start the run in the background; FileExistsError when one is running in this folder."""
        env = (
            {}
            if "OMP_NUM_THREADS" in os.environ
            else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.nproc))}
        )
        about = {"argv": self.argv, "nproc": self.nproc, "program": self.program, "grace_s": self.grace_s}
        self.job = Job.start(
            self.run_dir,
            self.command,
            about=about,
            grace_s=self.grace_s,
            die_with_parent=is_headless(),
            env=env,
            cwd=self.cwd,
        )
        self._watch()
        return self

    def resume(self, confirm: bool = False) -> Launcher:
        """Start the same command again: the trainer goes on from the newest checkpoint of the run folder.

        Parameters
        ----------
        confirm : run `command` although the folder was not made here, or names a program of somebody else.

        Raises
        ------
        FileNotFoundError : there is nothing to go on from.
        NotOurs : see `confirm`.
        """
        if self.state != "running" and not self.can_resume:
            raise FileNotFoundError(f"{self.run_dir} holds no run to resume; use start()")
        if self._doubt and not confirm:
            raise NotOurs(f"{self._doubt}; if you trust it, confirm that this may run: {shlex.join(self.command)}")
        return self.start()

    @property
    def can_resume(self) -> bool:
        return self.state != "running" and (bool(self.job.record) or Run(self.run_dir).config_file.exists())

    def stop(self, grace_s: float | None = None) -> Launcher:
        """End the run with all its processes; once it trains, it saves first. Blocks until they are gone."""
        self.job.stop(grace_s)
        self._refresh()
        return self

    def wait(self) -> Any:
        """Until the run ends. In a front end: `await launcher.wait()`, which also waits for Start to be pressed.
        Headless it blocks and prints progress.

        Raises
        ------
        RunFailed : the run failed; its own error ends the message. A run that was stopped raises nothing.
        """
        if not is_headless():
            return asyncio.ensure_future(self._wait_async())
        self._wait_blocking()
        return _Done()

    async def _wait_async(self) -> None:
        while self.state in ("not started", "running"):
            await asyncio.sleep(LOOK_S)
        self._finish()

    def _wait_blocking(self) -> None:
        printer = _Printer(self.job)
        try:
            while True:
                running = self.state == "running"  # before the file, so that the tail is never lost
                printer.print_new(final=not running)
                if not running:
                    break
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
        """Start, Stop and Resume, the state, the last log lines, and on failure the cause."""
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

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        if is_headless():  # a page has no buttons
            return {"text/plain": repr(self)}
        return self.widget._repr_mimebundle_(**kwargs)

    def __repr__(self) -> str:
        return f"Launcher({str(self.run_dir)!r}, state={self.state!r}, pid={self.pid})"


def _is_flag(arg: str, flag: str) -> bool:
    return arg.partition("=")[0].replace("_", "-") == flag


class _Printer:
    """Prints whole new lines of a job's log; a redrawn progress bar at most every five seconds."""

    BAR_S = 5.0

    def __init__(self, job: Job):
        self.job, self.offset = job, int(job.record.get("log_offset_bytes", 0))
        self.rest, self.last_bar, self.reporting = "", 0.0, False

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
            self.reporting = self.reporting or is_report(line)  # torchrun's table adds nothing to the cause
            if not self.reporting:
                print(line, flush=True)
