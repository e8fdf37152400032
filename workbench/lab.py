"""`dfm lab`: JupyterLab at the tour, on this machine only, with a token.

The server replaces this process; Ctrl-C ends it, and runs continue. The package's notebooks are copied for editing to
`notebooks/`; in a checkout, which has them there, to `my-notebooks/`, so that git stays clean.
"""

import contextlib
import importlib.util
import os
import secrets
import site
import socket
import sysconfig
from pathlib import Path

from dfm_nb.base.argv import forget_launcher
from dfm_nb.base.files import subfolder, write_atomically
from dfm_nb.base.options import Options, option
from dfm_nb.base.process import python_module
from workbench.place import FIRST, add_to_jupyter

DEFAULT_PORT = 8888
HOST = "127.0.0.1"
SHARE = "share/dfm_nb/notebooks"
"""Where the wheel puts the notebooks, below the environment's prefix (`data-files` in pyproject.toml)."""


class LabOptions(Options):
    """JupyterLab at the first notebook, on loopback, with a token."""

    prog = "dfm lab"
    port: int | None = option(None, f"default: {DEFAULT_PORT}, or the next free one", ge=1, le=65535)
    dir: str = option(".", "the project folder; notebooks/ and runs/ are below it")
    notebook: str | None = option(None, f"notebook to open first; default: {FIRST} of the copied notebooks")
    no_browser: bool = option(False, "only print the address")


def main(argv: list[str] | None = None) -> int:
    forget_launcher()  # kernels are no processes of torchrun
    args = LabOptions.parse(argv)
    if importlib.util.find_spec("jupyterlab") is None:
        raise ValueError("JupyterLab is not installed; pip install 'dfm_nb[notebook]'")
    folder = Path(args.dir).expanduser().resolve()
    if not folder.is_dir():
        raise NotADirectoryError(f"--dir must be a folder; got {folder}")
    port = free_port(args.port)
    copies = working_copy(folder)
    copied = provide(copies)
    if copied:
        print(f"copied {copied} notebooks to {copies}", flush=True)
    notebook = args.notebook or f"{copies.name}/{FIRST}"
    if not (folder / notebook).is_file():
        raise FileNotFoundError(f"there is no notebook {folder / notebook}")
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(16)
    print(f"open http://{HOST}:{port}/lab/tree/{notebook}?token={token}", flush=True)
    print("end with Ctrl-C twice; started runs continue", flush=True)
    os.environ["JUPYTER_TOKEN"] = token  # not in argv, where every user of the machine could read it
    add_to_jupyter("JUPYTER_CONFIG_PATH")
    add_to_jupyter("JUPYTER_PATH")
    os.chdir(folder)
    import zmq

    command = [
        *python_module("jupyterlab"),
        f"--ServerApp.ip={HOST}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        "--ServerApp.root_dir=.",
        f"--LabApp.default_url=/lab/tree/{notebook}",
        f"--ServerApp.open_browser={not args.no_browser}",
        "--ServerApp.log_level=WARN",
        # keys for the sockets between server and kernel, where ZeroMQ was built with them
        f"--KernelManager.transport_encryption={'auto' if zmq.has('curve') else 'disabled'}",
    ]
    if os.geteuid() == 0:
        command.append("--allow-root")
    os.execv(command[0], command)


def free_port(wanted: int | None) -> int:
    """`wanted`, or the first free one from 8888.

    Raises
    ------
    ValueError : it is taken.
    """
    tried = [wanted] if wanted is not None else range(DEFAULT_PORT, DEFAULT_PORT + 50)
    for port in tried:
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
    raise ValueError(f"port {tried[0]} is taken; choose another --port, or leave it out for a free one")


def shipped() -> Path | None:
    """The notebooks of this installation, or None.

    They are next to the source tree, under the environment's share/, or (pip --target) next to the package.
    """
    top = Path(__file__).parents[1]
    user = Path(site.getuserbase())
    for folder in (top / "notebooks", Path(sysconfig.get_path("data")) / SHARE, user / SHARE, top / SHARE):
        if (folder / FIRST).is_file():
            return folder
    return None


def working_copy(folder: Path) -> Path:
    """The folder of the working copies: `notebooks/`, unless those are the package's own, as in a checkout."""
    own = folder / "notebooks"
    return folder / "my-notebooks" if own.is_dir() and own.resolve() == shipped() else own


def provide(folder: Path) -> int:
    """Copy the shipped notebooks that the folder lacks, with their pictures, and return how many.

    A foreign folder is not touched.
    """
    source = shipped()
    files = sorted(source.glob("*.ipynb")) if source else []
    missing = [file for file in files if not os.path.lexists(folder / file.name)]
    if not source or not missing or (folder.exists() and missing == files):
        return 0
    subfolder(folder.parent, folder.name, "images")
    for file in (*missing, *(source / "images").iterdir()):
        target = folder / file.relative_to(source)
        if not os.path.lexists(target):
            write_atomically(target, file.read_bytes())
    return len(missing)
