"""Shared parts of all command lines: flags in both spellings, short errors.

A driver module has `main(argv: list[str] | None = None) -> int`, which `dfm <verb>` calls (`base.verb`). One that
torchrun starts ends with `if __name__ == "__main__": raise SystemExit(guard(main))`.
"""

import argparse
import contextlib
import difflib
import errno
import json
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Callable, NoReturn

from dfm_nb.base.files import DISK_FULL
from dfm_nb.base.log import legible, log
from dfm_nb.base.process import PARENT, end_with_parent

TOLD = "DFM_NB_ANSWER"
"""Environment variable: the file in which `dfm --json`, or a process that it started, leaves its answer or error."""
USER_ERRORS = (ValueError, OSError)
"""OSError: a file of the user's, or a disk or system at fault."""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name with the most similar spelling, ignoring case; None if none is close.

    Parameters
    ----------
    cutoff : least similarity, from 0 (nothing in common) to 1 (equal).
    """
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1, cutoff)
    return by_lower[near[0]] if near else None


def meant(name: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The end of an error about a wrong name: `did you mean 'demo'?`, or `otherwise` if no known name is close."""
    near = nearest(name, known, cutoff)
    return f"did you mean {near!r}?" if near else otherwise


class ArgumentParser(argparse.ArgumentParser):
    """argparse with `--num_steps` accepted for `--num-steps`, and errors that are raised."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        args = sys.argv[1:] if args is None else args
        dashed = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), arg) for arg in args]
        given = Counter(self._option_string_actions.get(arg.partition("=")[0]) for arg in dashed)
        for action, count in given.items():
            if isinstance(action, argparse._StoreAction) and count > 1:
                log.warning("%s is given %d times, and the last one counts", action.option_strings[0], count)
        return super().parse_known_args(dashed, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise ValueError, which `guard` prints as one sentence; for an unknown flag, with the closest one."""
        unknown = re.search(r"unrecognized arguments: --([\w-]+)", message)
        fix = "see its --help"
        if unknown:
            fix = meant("--" + unknown[1], self._option_string_actions, fix, 0.7)
        raise ValueError(f"{self.prog}: {message}; {fix}")


def run_command(prog: str, commands: Mapping[str, tuple[Callable[..., int], str]], argv: list[str] | None) -> int:
    """Run `prog COMMAND ...` of a verb with several commands; `commands` maps names to (command, help)."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(usage(f"{prog} COMMAND", commands))
        return 0
    if name not in commands:
        raise ValueError(f"{prog} has {', '.join(commands)}; got {name!r}")
    return commands[name][0](rest)


def usage(words: str, about: Mapping[str, tuple[Any, str]]) -> str:
    """The `--help` of `words`: a line about each name that may follow."""
    width = max(map(len, about))
    lines = (f"  {name:<{width}}  {text}" for name, (_, text) in about.items())
    return f"usage: {words} ...   ({words} --help for its flags)\n\n" + "\n".join(lines)


def guard(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> int:
    """Run `main`; a user's error gives one sentence on stderr and exit code 2, an interrupt exit code 130.

    `DFM_DEBUG=1` shows the traceback.
    """
    quiet_libraries()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun starts its workers in new sessions
        end_with_parent()
    parent = os.environ.pop(PARENT, None)
    if parent:
        end_with_parent(signal.SIGTERM, int(parent))
    try:
        return main(argv)
    except KeyboardInterrupt as error:
        print(str(error) or "interrupted", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("DFM_DEBUG") == "1":
            raise
        text = mistake(error)
        if text is not None:
            print(legible(f"error: {text}"), file=sys.stderr, flush=True)
            answer = os.environ.get(TOLD)
            if answer:
                Path(answer).write_text(json.dumps({"error": text}), encoding="utf-8")
            return 2
        lost = re.search(r"gloo/transport/\S+\] (.*?)(\. |$)", str(error), re.M)
        if not lost or not isinstance(error, RuntimeError):
            raise
        rank = os.environ.get("RANK", 0)  # the process that ended first, or its launcher, prints the cause
        print(f"rank {rank} ends because it lost another process: {lost[1]}", file=sys.stderr, flush=True)
        time.sleep(1)  # the launcher polls ten times a second and sees which was first
        return 1


def mistake(error: Exception) -> str | None:
    """A sentence for errors that a user or administrator can fix; None for a bug of ours."""
    number = getattr(error, "errno", None)
    file = getattr(error, "filename", None)
    # sqlite's words, in which Energon's index is written, and torch's of the ranks' store; ours are ValueErrors
    full = re.search(f"disk is full|{os.strerror(errno.ENOSPC)}", str(error))
    if number in DISK_FULL or (full and not isinstance(error, ValueError)):
        temporary = os.environ.get("TMPDIR") or tempfile.gettempdir()
        where = f" for {file}" if file else f", perhaps in /dev/shm or {temporary}"
        return f"there is no space left{where} (or ulimit -f is too low); free some space and run the command again"
    if number == errno.ENAMETOOLONG:
        return f"a path must be shorter: {str(file)[:80]}..."
    too_many = os.strerror(errno.EMFILE)
    if too_many in str(error):  # from Python or gloo
        return f"a process must be able to open more files ({too_many}); raise ulimit -n"
    if not isinstance(error, USER_ERRORS):
        return None
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {file}" if file else f"{error.strerror} (DFM_DEBUG=1 shows where)"
    return str(error) or type(error).__name__


LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Environment variables that torchrun sets. A shell, an image or a pod may hold them too, without any launcher."""


def from_launcher(name: str) -> int:
    """One of `LAUNCHER`; without RANK the process is alone: a rank is 0, a size 1.

    Raises
    ------
    ValueError : it is not a number, or the ranks are not below their sizes.
    """
    values = dict(zip(LAUNCHER, (0, 1, 0, 1)))
    if "RANK" not in os.environ:
        return values[name]
    for each in LAUNCHER:
        text = os.environ.get(each, str(values[each]))
        if not text.isdecimal():
            raise ValueError(f"{each} must be a number, as torchrun sets it; got {text!r}; unset RANK for one process")
        values[each] = int(text)
    if values["RANK"] >= values["WORLD_SIZE"]:
        got = f"got RANK={values['RANK']}, WORLD_SIZE={values['WORLD_SIZE']}"
        raise ValueError(f"RANK must be below WORLD_SIZE, as torchrun sets both; {got}; unset RANK for one process")
    return values[name]


def forget_launcher() -> None:
    """Make this process, and what it starts, one that no launcher started."""
    for name in LAUNCHER:
        os.environ.pop(name, None)


@contextlib.contextmanager
def imported_without(instead: Mapping[str, Any]) -> Iterator[None]:
    """Within the block these modules are the given objects, if they are not there yet; None: they cannot be imported.

    >>> with imported_without({"json.tool": None}):
    ...     import json.tool
    Traceback (most recent call last):
    ModuleNotFoundError: import of json.tool halted; None in sys.modules
    """
    absent = [name for name in instead if name not in sys.modules]
    sys.modules.update({name: instead[name] for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def quiet_libraries() -> None:
    """Suppress deprecation warnings of megatron-core and torch in a command's output."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed).*")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(megatron|torch\.jit).*")
    for message in ("full scope is deprecated", "Apex is not installed", ".* is experimental and still under"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not", category=UserWarning)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """`quiet_libraries` for a call from Python, which restores the caller's filters; also a decorator."""
    with warnings.catch_warnings():
        quiet_libraries()
        yield


NPROC = "dfm also accepts --nproc-per-node N: N processes on this machine, one for each GPU or CPU core."
"""Epilog of the help of a verb that runs under torchrun."""


def pop_nproc(argv: list[str] | None) -> tuple[int | None, list[str]]:
    """Remove `--nproc-per-node N` (either spelling, with or without `=`) from argv."""
    p = ArgumentParser(add_help=False, allow_abbrev=False)
    p.add_argument("--nproc-per-node", nargs="?", const="")
    known, rest = p.parse_known_args(argv)
    n = known.nproc_per_node
    if n is not None and (not n.isdigit() or int(n) < 1):
        raise ValueError(f"--nproc-per-node needs a positive integer; got {n!r}")
    return None if n is None else int(n), rest
