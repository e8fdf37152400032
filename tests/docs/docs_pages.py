"""Runs the code blocks of a documentation page, in order, in an empty folder; what the tests of all pages share.

Every ```bash and ```python block is run; ```text, ```yaml and the like are shown only. `dfm` and `python` blocks come from a server that has paid for
the imports and forks for each: the same `dfm_nb.cli.entry`, in a fresh process, without ten seconds of imports each. `torchrun` is the real one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = ("bash", "python")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.M | re.S)
CLIENT = """#!{python} -SE
import json, os, socket, sys
place = {address!r}
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
    s.connect(place)
    ask = dict(argv=sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ))
    socket.send_fds(s, [json.dumps(ask).encode()], [0, 1, 2])
    said = s.recv(16)
sys.exit(int(said) if said else 137)
"""


class Page:
    """A page of the documentation by its path from the root."""

    def __init__(self, name: str):
        self.path = ROOT / name
        self.text = self.path.read_text(encoding="utf-8")
        self.fences = [(language, _dedent(code, len(pad))) for pad, language, code in FENCE.findall(self.text)]
        self.blocks = [(language, code) for language, code in self.fences if language in RUN]

    def links(self) -> list[str]:
        """Targets of links and pictures that are paths."""
        prose = FENCE.sub("", self.text)
        found = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
        return [t for t in found if "://" not in t and not t.startswith("mailto:")]

    def missing_links(self) -> list[str]:
        """Those that lead to no file, or to no heading of it."""
        return [t for t in self.links() if not self._resolves(t)]

    def _resolves(self, target: str) -> bool:
        path, _, anchor = target.partition("#")
        file = (self.path.parent / path).resolve() if path else self.path
        if not file.exists() or not file.is_relative_to(ROOT):
            return False
        return not anchor or anchor in anchors(file.read_text(encoding="utf-8"))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ +(.*?) *$", FENCE.sub("", text), re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", t).lower() for t in titles]
    seen: Counter[str] = Counter()
    found = set()
    for title in plain:
        anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        found.add(anchor + (f"-{seen[anchor]}" if seen[anchor] else ""))
        seen[anchor] += 1
    return found


def _dedent(code: str, pad: int) -> str:
    return "\n".join(line[pad:] if line[:pad].isspace() else line for line in code.split("\n"))


def all_pages() -> list[Path]:
    """README, CONTRIBUTING, SECURITY and every page under docs/ and deploy/."""
    top = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "deploy").glob("*.md"))]


# ---- running ------------------------------------------------------------------------------------------------------


class Desk:
    """A folder to run blocks in, with its environment; `said` gathers all that they print."""

    def __init__(self, folder: Path, env: dict[str, str]):
        self.folder, self.env, self.said = folder, env, ""

    def tool(self, name: str, script: str) -> None:
        """A command of this desk alone, before all others on the PATH."""
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self, language: str, code: str) -> str:
        """Run one block; an AssertionError shows it with what it printed when it fails."""
        start = {"bash": ["bash", "-euo", "pipefail", "-c", code], "python": ["dfm-python", code]}[language]
        began = time.monotonic()
        done = subprocess.run(
            start, cwd=self.folder, env=self.env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=900
        )
        print(f"{time.monotonic() - began:6.1f} s  {code.strip().splitlines()[0]}", flush=True)
        assert done.returncode == 0, f"{code}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        assert "Traceback" not in done.stderr, f"{code}\n{done.stderr[-4000:]}"
        self.said += done.stdout + done.stderr
        return done.stdout

    def run_page(self, page: Page) -> str:
        for language, code in page.blocks:
            self.run(language, code)
        return self.said


@contextmanager
def desk(folder: Path, preload: tuple[str, ...], hf: str | None = None, **environment: str) -> Iterator[Desk]:
    """A desk whose `dfm` has `preload` imported.

    Parameters
    ----------
    hf : bash that stands in for the `hf` command, as there is no hub. environment : added for all blocks.
    """
    env = dict(os.environ, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", **environment)
    env["PATH"] = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), env["PATH"]])
    here = Desk(folder, env)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    if hf is not None:
        here.tool("hf", hf)
    with tempfile.TemporaryDirectory(prefix="dfm-docs-") as place:
        address = os.path.join(place, "s")
        here.tool("dfm", CLIENT.format(python=sys.executable, address=address))
        here.tool(
            "dfm-python", CLIENT.format(python=sys.executable, address=address).replace("argv=", 'name="python", argv=')
        )
        server = subprocess.Popen([sys.executable, "-m", "tests.docs_pages", address, *preload], cwd=ROOT, env=env)
        try:
            while not os.path.exists(address):
                assert server.poll() is None, "the server of `dfm` did not start"
                time.sleep(0.05)
            yield here
        finally:
            server.terminate()
            server.wait()


# ---- the server ---------------------------------------------------------------------------------------------------


def serve(address: str, preload: list[str]) -> None:
    """Fork one process for each request, until terminated."""
    import importlib

    for module in preload:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address + ".new")
        listener.listen(16)
        os.rename(address + ".new", address)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _attend(connection)
            connection.close()


def _attend(connection: socket.socket) -> None:
    """Start the request's process, pass on its end, and end it when the one who asked is gone."""
    import select

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    worker = os.fork()
    if worker == 0:
        _work(json.loads(message), fds)
    for fd in fds:
        os.close(fd)
    handle = os.pidfd_open(worker)
    ready, _, _ = select.select([handle, connection], [], [])
    if handle not in ready:
        os.kill(worker, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    if handle in ready:
        connection.send(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def _work(ask: dict, fds: list[int]) -> None:
    """Become the command."""
    import atexit
    import runpy
    import traceback

    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    os.environ.clear()
    os.environ.update(ask["env"])
    os.chdir(ask["cwd"])
    code: object = 1
    try:
        if ask.get("name") == "python":
            sys.argv, sys.path[0] = ["-c"], ""
            with tempfile.TemporaryDirectory() as place:
                script = Path(place, "block.py")
                script.write_text(ask["argv"][0])
                runpy.run_path(str(script), run_name="__main__")
            code = 0
        else:
            from dfm_nb.cli import entry

            sys.argv, sys.path[0] = ["dfm", *ask["argv"]], ""
            entry()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
