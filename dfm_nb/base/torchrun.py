"""torchrun for the processes of one machine: nothing listens beyond the loopback.

torchrun's store and its agent's store listen on all interfaces, and anybody who can reach them can write data that is
unpickled there. Here the agent's rendezvous is a file in a folder that only this user can open (`--rdzv-conf
store_type=file`; torch 2.13 opens a second TCP store for the workers unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is
set), the workers find each other through a file next to it (`parallel.groups` reads `STORE`), and gloo and NCCL use the
loopback device. Several nodes need a network: `torchrun` itself, see docs/cluster.md.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from dfm_nb.base import process
from dfm_nb.base.argv import from_launcher

HUNG = 3
"""Exit code of a process that ends a hung run (`training.watchdog`)."""
STORE = "DFM_NB_STORE"
"""Environment variable: the file through which the processes of one machine find each other."""

KEPT_BYTES = {"MALLOC_MMAP_THRESHOLD_": 32 << 20, "MALLOC_TRIM_THRESHOLD_": 1 << 30}
"""Freed memory that glibc keeps for the next tensor. By default each step returns its tensors to the system, and the
system clears every page again."""


def torchrun_argv(module: str, argv: Sequence[str], nproc_per_node: int) -> list[str]:
    """The command that runs `python -m module argv`, or a `.py` file, on `nproc_per_node` local processes."""
    program = [str(Path(module).resolve())] if module.endswith(".py") else ["-m", module]
    launcher = process.python_module("dfm_nb.base.torchrun")
    return [*launcher, f"--nproc-per-node={nproc_per_node}", *program, *argv]


def run_under_torchrun(argv: Sequence[str]) -> int:
    """Run torchrun with one machine's rendezvous, and one OpenMP thread per process unless that is set.

    It runs in this process: a kill reaches the launcher itself, and a worker's error ends with the worker's own
    sentence, without torchrun's report. Returns the exit code of the worker that failed first.

    argv : torchrun's arguments, without those of the rendezvous.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="dfm_nb-") as folder:  # mode 700
        os.environ[STORE] = f"{folder}/workers"
        # the agent's heartbeats are appended to the file: one a minute, because no other node waits for them
        conf = "store_type=file,keep_alive_interval=60"
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/agent", f"--rdzv-conf={conf}"]
        forwarded = ",".join(number.name for number in (*process.stops(), signal.SIGQUIT))  # to the workers
        args = parse_args([*rendezvous, f"--signals-to-handle={forwarded}", *argv])
        if args.module:  # torchrun's own command puts the current folder first; a `.py` keeps its folder
            os.environ["PYTHONSAFEPATH"] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(args.nproc_per_node))))
        for name, size in KEPT_BYTES.items():
            os.environ.setdefault(name, str(size))
        try:
            run(args)
            return 0
        except SignalException as stopped:
            return 128 + stopped.sigval
        except ChildFailedError as failed:
            if Path(f"{folder}/workers.hung").exists():  # the watchdog printed the cause, and killed processes itself
                return HUNG
            # the others end at once when one has ended, so torchrun may see them first
            signalled = {r: f for r, f in failed.failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
            rank, failure = next(iter(signalled.items()), None) or failed.get_first_failure()
            if failure.exitcode >= 0:
                if rank and failure.exitcode == 1:  # an exception, whose traceback may not have the rank
                    print(f"rank {rank} failed first", file=sys.stderr, flush=True)
                return failure.exitcode
            name = signal.Signals(-failure.exitcode).name
            hint = "; often the machine ran out of memory" if name == "SIGKILL" else ""
            print(f"error: the process of rank {rank} was ended by {name}{hint}", file=sys.stderr, flush=True)
            return 128 - failure.exitcode


def mark_hung() -> None:
    """Tell the launcher, before processes are killed, that the run hangs and the cause was printed."""
    if STORE in os.environ:
        Path(f"{os.environ[STORE]}.hung").touch()


def group_of_this_machine(timeout: timedelta) -> dict[str, Any]:
    """Arguments of `init_process_group` that keep one machine's processes on the loopback; {} for several machines.

    The ranks' store is TCP, because the watchdog's heartbeats would fill a file; rank 0 binds it to the loopback
    itself, because torch binds to all interfaces.
    """
    import torch.distributed as dist

    rank = from_launcher("RANK")
    world = from_launcher("WORLD_SIZE")
    if world > 1 and not {STORE, "MASTER_ADDR"} & os.environ.keys():
        raise ValueError(f"RANK={rank} must come from torchrun, which sets MASTER_ADDR too; unset RANK for one process")
    if "LOCAL_WORLD_SIZE" in os.environ and world != from_launcher("LOCAL_WORLD_SIZE"):
        return {}
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if "RANK" not in os.environ:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if STORE not in os.environ:  # the user runs torchrun
        return {}
    shared = dist.FileStore(os.environ[STORE], world)
    host = "127.0.0.1"
    listener = None
    if rank == 0:
        server = socket.create_server((host, 0))  # early connections wait in its backlog
        shared.set("port", str(server.getsockname()[1]))
        listener = server.detach()
    port = int(shared.get("port"))
    store = dist.TCPStore(host, port, world, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener)
    return {"store": store, "rank": rank, "world_size": world}


def launch(verb: str, argv: list[str], num_processes: int) -> None:
    """`dfm VERB --nproc-per-node N ...` as a process, for Python; an interrupt stops it as SIGTERM does.

    Raises
    ------
    RuntimeError : it failed, after it printed the cause.
    """
    command = [*process.python_module("dfm_nb"), verb, f"--nproc-per-node={num_processes}", *argv]
    started = psutil.Popen(command, env={**os.environ, process.PARENT: str(os.getpid())})
    try:
        code = started.wait()
    finally:
        process.end(started, process.GRACE_S)
    if code:
        raise RuntimeError(f"dfm {verb} on {num_processes} processes ended with exit code {code}; the cause is above")


if __name__ == "__main__":
    process.end_with_parent(signal.SIGTERM)  # the notebooks' supervisor
    raise SystemExit(run_under_torchrun(sys.argv[1:]))
