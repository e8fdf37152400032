"""What every command line of the project shares: flags in both spellings, short errors, torchrun on request.

A driver module has `main(argv: list[str] | None = None) -> int`, builds its parser from `ArgumentParser` and ends with
`if __name__ == "__main__": raise SystemExit(guard(main))`. `dfm <verb>` calls the same `main`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Callable

USER_ERRORS = (ValueError, FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with defaults shown in `--help`, and `--num_steps` accepted for `--num-steps`."""

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        args = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_dashed(a) for a in args], namespace)


def _dashed(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    flag, eq, value = arg.partition("=")
    return flag.replace("_", "-") + eq + value


def guard(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> int:
    """Run `main`; a user's mistake ends in one sentence on stderr and exit code 2, an interrupt in 130.

    `DFM_DEBUG=1` shows the traceback.
    """
    quiet_libraries()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun puts its workers in sessions of their own
        end_with_parent()
    try:
        return main(argv)
    except USER_ERRORS as error:
        if os.environ.get("DFM_DEBUG") == "1":
            raise
        text = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.filename else str(error)
        print(f"error: {text}", file=sys.stderr, flush=True)
        return 2
    except BrokenPipeError:  # the reader of our output (head, less) has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130


def end_with_parent() -> None:
    """When the process that started this one is gone, this one goes too instead of working on unseen.

    Linux kills it at once; elsewhere, and where the signal gets lost, a look at the parent does within a second.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if parent == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
            os._exit(1)  # it was killed before: we now belong to init

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def world_size_from_env() -> int:
    """Number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def quiet_libraries() -> None:
    """Leave out of a command's output what megatron-core and torch say of their own future."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch\.distributed).*")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(megatron|torch\.jit).*")
    warnings.filterwarnings("ignore", message="full scope is deprecated", category=UserWarning)
    warnings.filterwarnings(
        "ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning
    )


def torchrun_argv(module: str, argv: list[str], nproc_per_node: int) -> list[str]:
    """The command that runs `python -m module argv` on `nproc_per_node` local processes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc_per_node}"]
    return [*launch, "-m", module, *argv]


def pop_nproc(argv: list[str]) -> tuple[int | None, list[str]]:
    """Take `--nproc-per-node N` (either spelling, with or without `=`) out of argv."""
    rest, n, i = [], None, 0
    while i < len(argv):
        flag, eq, value = _dashed(argv[i]).partition("=")
        if flag == "--nproc-per-node":
            if not eq:
                i += 1
                value = argv[i] if i < len(argv) else ""
            if not value.isdigit() or int(value) < 1:
                raise ValueError(f"--nproc-per-node needs a positive whole number; got {value!r}")
            n = int(value)
        else:
            rest.append(argv[i])
        i += 1
    return n, rest


def run_under_torchrun(module: str, argv: list[str], nproc_per_node: int) -> int:
    """Be torchrun for local processes of `python -m module argv`, with one OpenMP thread each unless that is set.

    It runs in this process: whoever kills it kills the launcher itself, and a worker's mistake ends in the worker's
    own sentence, without torchrun's report below it. Returns the exit code of the worker that failed first.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc_per_node)))
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(torchrun_argv(module, argv, nproc_per_node)[3:]))
        return 0
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        hint = "; often that means that memory ran out" if name == "SIGKILL" else ""
        print(f"error: the process of rank {rank} was ended by {name}{hint}", file=sys.stderr, flush=True)
        return 128 - failure.exitcode
