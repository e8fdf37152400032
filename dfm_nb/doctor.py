"""`dfm doctor`: what this machine has and what is missing, with a fix on each line.

The exit code is 1 if something required is missing.
"""

import fcntl
import importlib
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dfm_nb.base import plugins
from dfm_nb.base.machine import GIB, available_bytes, fast_bf16
from dfm_nb.base.verb import Report, Verb

PACKAGES = {
    **dict.fromkeys(("torch", "dfm_nb.parallel", "megatron.energon", "transformers", "av"), ""),
    "flash_attn": "faster packed attention on CUDA (otherwise torch's varlen attention)",
    "transformer_engine": "fused optimizer kernels on CUDA",
    "wandb": "logger.wandb_project",
    "jupyterlab": "notebooks",
}
"""Modules that are imported, since wheels also fail for want of a system library; and their use, "" if required."""

Finding = tuple[str, str]
"""ok, note or MISSING, and a sentence."""


class DoctorOptions(Verb):
    """Check this machine: what it has and what is missing."""

    prog = "dfm doctor"

    def run(self) -> list[Finding]:
        return list(findings())

    def report(self, result: list[Finding]) -> Report:
        missing = sum(level == "MISSING" for level, _ in result)
        end = f"{missing} thing(s) missing" if missing else "everything that is needed is here"
        lines = [f"{level:<7} {text}" for level, text in result]
        answer = {"missing": missing, "findings": [{"level": level, "text": text} for level, text in result]}
        return Report(answer, "\n".join([*lines, "", end]), int(missing > 0))


main = DoctorOptions.main


def findings() -> Iterator[Finding]:
    """Of packages, plug-ins, processors, disk and memory."""
    for name, use in PACKAGES.items():
        try:
            importlib.import_module(name)
            yield "ok", name
        except (ImportError, OSError) as error:
            yield "note" if use else "MISSING", f"{name}: {error}; {use or 'pip install -c constraints.txt -e .'}"
    for kind in plugins.PASSED:
        for module in plugins.load_all(kind).values():
            if not hasattr(module, "check"):
                continue
            try:
                module.check()
                yield "ok", f"{module.__name__}: all that it needs is here"
            except (ImportError, OSError, ValueError) as error:
                yield "MISSING" if getattr(module, "BUNDLED", False) else "note", f"{module.__name__}: {error}"

    import torch

    yield "ok", f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield "ok", f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB"
    yield from _cuda()
    if not torch.cuda.is_available():
        bf16 = "bf16" if fast_bf16() else "fp32, as bf16 is slower here"
        yield "note", f"no CUDA device: gloo on {os.cpu_count()} CPU cores; mixed_precision=auto is {bf16}"
    yield from _this_place()
    disk = shutil.disk_usage(".").free / GIB
    memory = available_bytes(torch.device("cpu")) / GIB
    yield "ok" if disk > 5 else "note", f"{disk:.0f} GiB of disk free here, {memory:.0f} GiB of memory available"


def _cuda() -> Iterator[Finding]:
    """Whether torch can use the GPUs that nvidia-smi is here for; nothing without it."""
    import torch

    if shutil.which("nvidia-smi"):
        try:
            torch.cuda.init()
            yield "ok", f"torch uses the GPUs through CUDA {torch.version.cuda}"
        except (RuntimeError, AssertionError) as error:  # no driver, an old one, no GPU, a CPU build of torch
            fix = "load or update the driver, or install a torch built for its CUDA (nvidia-smi says which)"
            yield "MISSING", f"nvidia-smi is here, but torch uses no GPU: {str(error).splitlines()[0]}; {fix}"


def _this_place() -> Iterator[Finding]:
    """Whether processes can talk over the loopback, and the current folder has the kernel's locks."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            yield "ok", "loopback: processes of this machine can connect"
    except OSError as error:
        yield "MISSING", f"processes cannot connect over 127.0.0.1 ({error}); run `ip link set lo up`"
    try:
        with tempfile.TemporaryFile(dir=".") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield "ok", f"file locks work in {Path.cwd()}"
    except OSError as error:
        yield "note", f"no file locks in {Path.cwd()} ({error}): run.pid alone keeps a second writer away"
