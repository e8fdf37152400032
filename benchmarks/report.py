"""What every benchmark writes: a table for people, JSON for programs, a sentence about the machine; and fits of growth.

Results are `NAME.md` and `NAME.json` in a results folder. Each file is written whole or not at all. Every JSON names
the machine, its load when the benchmark began, and the time.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import re
import statistics
from pathlib import Path
from typing import Any, Sequence

RESULTS = Path(__file__).resolve().parent / "results"


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

    from dfm_nb.base.cpu import fast_bf16

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


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """Least squares of log cost on log size: (k, c) of cost = c * size^k.

    Raises
    ------
    ValueError : fewer than two different sizes, or a number that is not positive.
    """
    if len(sizes) != len(costs) or len(set(sizes)) < 2:
        raise ValueError(
            f"a fit needs as many costs as sizes, and two different sizes; got {list(sizes)} and {list(costs)}"
        )
    if min(*sizes, *costs) <= 0:
        raise ValueError(f"sizes and costs must be positive; got {list(sizes)} and {list(costs)}")
    x, y = [math.log(s) for s in sizes], [math.log(c) for c in costs]
    slope, intercept = statistics.linear_regression(x, y)
    return slope, math.exp(intercept)


def fixed_and_growing(sizes: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """(a, b) of cost = a + b * size, so that start-up is told from growth.

    Minimises the squared relative error, so that small sizes count as much as large ones; a is at least 0.
    """
    weights = [1 / c**2 for c in costs]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, sizes)) / total
    mean_y = sum(w * y for w, y in zip(weights, costs)) / total
    above = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, sizes, costs))
    slope = above / sum(w * (x - mean_x) ** 2 for w, x in zip(weights, sizes))
    if mean_y - slope * mean_x < 0:
        slope = sum(w * x * y for w, x, y in zip(weights, sizes, costs)) / sum(
            w * x * x for w, x in zip(weights, sizes)
        )
        return 0.0, slope
    return mean_y - slope * mean_x, slope
