"""What every command line of the project shares: flags in both spellings, short errors, torchrun on request.

A driver module has `main(argv: list[str] | None = None) -> int`, builds its parser from `ArgumentParser` and ends with
`if __name__ == "__main__": raise SystemExit(guard(main))`. `dfm <verb>` calls the same `main`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
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
    """Linux: when the process that started this one is killed, this one goes too instead of working on unseen."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
            os._exit(1)  # it was killed before: we now belong to init


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
    """Launch and wait; one OpenMP thread per process unless the user chose otherwise."""
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc_per_node)))
    return subprocess.call(torchrun_argv(module, argv, nproc_per_node), env=env)
