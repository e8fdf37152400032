"""Processes for tests, forked from one server that has done the imports: ranks, `dfm`, `python`, `torchrun`, `energon`.

A command needs about ten seconds for imports if Python starts it, and 0.1 s if it is forked. `Commands.path` is a
folder for the PATH whose commands request a fork from this process. A fork has that `python` as `sys.executable`, so
torchrun's workers are forks too. Tests that kill processes start real ones.
"""

import functools
import gc
import json
import multiprocessing
import os
import pkgutil
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Callable, Iterable

import psutil

import dfm_nb
from dfm_nb.base.process import PARENT

PRELOAD = """
tests.conftest torch._dynamo torch.distributed.run torch.utils.tensorboard megatron.energon pandas workbench.form
matplotlib.backends.backend_agg matplotlib.pyplot workbench.notebook_run transformers.models.auto.modeling_auto
transformers.models.bert.modeling_bert transformers.models.t5.modeling_t5
""".split()
CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
words = {words!r} + sys.argv[1:]
del words[: words[:2] == ["-P", "-m"]]
if not words or words[0] not in ("-c", "-m", "-u") and not words[0].endswith(".py"):
    os.execv({python!r}, [{python!r}, *words])  # what is asked of the real one: --version, an isolated supervisor
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
    s.connect({address!r})
    ask = dict(words=words, executable={executable!r}, cwd=os.getcwd(), env=dict(os.environ))
    socket.send_fds(s, [json.dumps(ask).encode()], [0, 1, 2])
    pid = int(s.recv(16))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    code = int(s.recv(16) or -9)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@functools.cache
def fork_context() -> ForkServerContext:
    """Starts processes from the server; a fork of this process would carry half of its process groups."""
    context = multiprocessing.get_context("forkserver")
    ours = [m.name for m in pkgutil.walk_packages(dfm_nb.__path__, "dfm_nb.") if not m.name.endswith("__main__")]
    context.set_forkserver_preload([*PRELOAD, *ours])
    return context


class Commands:
    """Serves `dfm`, `python`, `torchrun` and `energon` from forks while this process lives."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dfm-tests-")
        self.path = Path(self._folder.name)
        address, python = str(self.path / "socket"), str(self.path / "python")
        modules = {"dfm": "dfm_nb", "torchrun": "torch.distributed.run", "energon": "megatron.energon.cli.main"}
        for name, words in {"python": [], **{name: ["-m", module] for name, module in modules.items()}}.items():
            place = self.path / name
            client = CLIENT.format(python=sys.executable, words=words, address=address, executable=python)
            place.write_text(client, encoding="utf-8")
            place.chmod(place.stat().st_mode | stat.S_IXUSR)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    def environment(self, **more: str) -> dict[str, str]:
        """This process's environment with the commands first on the PATH."""
        path = os.pathsep.join([str(self.path), str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **more}

    def run(self, *words: object, **settings) -> subprocess.CompletedProcess[str]:
        """`dfm ...`, `python ...` or `torchrun ...` as subprocess.run returns it, with its output as text."""
        name, *rest = map(str, words)
        settings = {"capture_output": True, "text": True, "timeout": 300, "env": self.environment(), **settings}
        return subprocess.run([str(self.path / name), *rest], **settings)

    def start(self, *words: object, **settings) -> subprocess.Popen[str]:
        """The same without waiting, with both outputs in one; a SIGTERM, SIGINT or SIGUSR1 is
        passed on, and a SIGKILL ends the fork too.
        """
        name, *rest = map(str, words)
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **settings}
        return subprocess.Popen([str(self.path / name), *rest], env=self.environment(), **settings)

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=_attend, args=(connection,), daemon=True).start()


@functools.cache
def commands() -> Commands:
    """The commands of this process."""
    return Commands()


def _attend(connection: socket.socket) -> None:
    """Fork a process for the request, report its end, and kill it if the requester is gone."""
    process = fork_context().Process(target=_become, args=(connection,))
    process.start()
    with connection:
        connection.send(str(process.pid).encode())
        poll = select.poll()
        poll.register(connection, 0)  # nothing but a hang-up: the request itself is read by the child
        poll.register(process.sentinel, select.POLLIN)
        if process.sentinel not in {fd for fd, _ in poll.poll()}:
            process.kill()
        process.join()
        try:
            connection.send(str(process.exitcode).encode())
        except OSError:
            pass


def _become(connection: socket.socket) -> None:
    """In the fork: adopt the requester's arguments, folder, environment and output."""
    import atexit
    import traceback

    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    gc.freeze()  # a garbage collection would copy the pages of everything imported before the fork
    # torchrun's own asks `inspect` for the whole stack, which goes through all modules: 2 s with ours
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    message, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    connection.close()
    ask = json.loads(message)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(ask["env"])
    os.environ.pop(PARENT, None)  # the server is its parent
    os.chdir(ask["cwd"])
    sys.executable = ask["executable"]
    code: object = 0
    try:
        _run(ask["words"][ask["words"][0] == "-u" :])
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run(words: list[str]) -> None:
    """`-m MODULE ...`, `-c CODE ...` or `FILE.py ...`, as `__main__`."""
    import runpy

    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], ""
        sys.modules.pop(words[1], None)  # runpy warns about a module that is already imported
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        with tempfile.TemporaryDirectory() as place:
            script = Path(place, "block.py")  # a file, so that classes and tracebacks have their source
            script.write_text(words[1])
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            runpy.run_path(str(script), run_name="__main__")
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


# ---- waiting --------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], object], about: str, timeout_s: float = 240, pause_s: float = 0.02) -> None:
    """Poll `condition()` until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for: {about}"
        time.sleep(pause_s)


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Processes that still run; a zombie does not count."""
    found = []
    for p in processes:
        try:
            found += [p] if p.is_running() and p.status() != psutil.STATUS_ZOMBIE else []
        except psutil.NoSuchProcess:
            pass
    return found
