"""What every benchmark shares: its arguments, its processes, a text to read, a table for people and JSON for programs.

Results are `NAME.md` and `NAME.json` in a results folder. Each file is written whole or not at all. Every JSON names
the machine, its load when the benchmark began, and the time.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"


def arguments(about: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser with `--output-dir` and a flag an option.

    options : a flag's default, whose type its values have, or (default, help).
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in options.items():
        default, words = option if isinstance(option, tuple) else (option, None)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default, help=words)
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    return parser


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Processor, usable cores, Python, torch, threads, load average over a minute, and the time (UTC)."""
    import torch

    from dfm_nb.base.machine import fast_bf16

    instructions = torch.backends.cpu.get_cpu_capability() + (" with bfloat16" if fast_bf16() else "")
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "instructions": instructions,
        "load_before": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def sentence(about: dict[str, Any]) -> str:
    """`machine()` in words, for the head of a table."""
    cpu = ", ".join(filter(None, (about["processor"], about.get("instructions"))))  # older results lack the second
    return (
        f"{about['cores']} cores ({cpu}), Python {about['python']}, torch {about['torch']}, "
        f"{about['threads']} thread(s) a process, load average {about['load_before']} at the start, {about['date']}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; cells are shown with `str`."""
    lines = [head, ["---"] * len(head), *rows]
    assert all(len(line) == len(head) for line in lines), (head, rows)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, least, greatest)."""
    return statistics.median(values), min(values), max(values)


def timed(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a call; `time.process_time` counts CPU time, which other processes disturb less."""
    begun = clock()
    function()
    return clock() - begun


def of_process(
    argv: Sequence[str | Path],
    memory: Callable[[Any], int] = lambda process: 0,
    every_s: float = 0.25,
    **environment: str | None,
) -> tuple[str, int]:
    """What `python ARGV` prints, and the most that `memory` gives of its `psutil.Process` on the way.

    environment : changes; None takes a variable out.

    Raises
    ------
    RuntimeError : it failed.
    """
    import psutil

    changed = {"OMP_NUM_THREADS": "1"} | environment
    env = {k: v for k, v in (os.environ | changed).items() if v is not None}
    peak = 0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = psutil.Popen([sys.executable, *argv], env=env, stdout=out, stderr=errors)
        while process.poll() is None:
            try:
                peak = max(peak, memory(process))
            except (psutil.Error, OSError):  # it or a child has just ended
                pass
            time.sleep(every_s)
        for file in (out, errors):
            file.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(map(str, argv))} ended with {process.returncode}:\n{errors.read()}")
        return out.read(), peak


def write(name: str, result: dict[str, Any], text: str, folder: Path = RESULTS) -> None:
    """`text` to `NAME.md` and `result` to `NAME.json`."""
    from dfm_nb.base.files import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{name}.json", (json.dumps(result, indent=1) + "\n").encode())
    write_atomically(folder / f"{name}.md", (text.rstrip() + "\n").encode())


def save(name: str, result: dict[str, Any], text: str, folder: Path = RESULTS) -> None:
    """`write`, and print `text`."""
    write(name, result, text, folder)
    print(text, flush=True)


def write_library(path: Path, megabytes: float) -> None:
    """Write a JSONL of `megabytes` of text: Python's own library and the installed packages, in pieces of 4,000
    characters."""
    written, roots = 0, [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    with path.open("w", encoding="utf-8") as out:
        for file in (file for root in roots for file in sorted(root.rglob("*.py"))):
            whole = file.read_text(encoding="utf-8", errors="ignore")
            for start in range(0, len(whole), 4000):
                written += out.write(json.dumps({"text": whole[start : start + 4000]}) + "\n")
                if written >= megabytes * 1e6:
                    return
    raise ValueError(f"the installed Python holds {written / 1e6:.0f} MB of text, not the {megabytes:g} asked for")
