"""What does a repaint of the monitor cost after a thousand records, and after a million?

    python benchmarks/monitor.py [--records 1000 1000000] [--repaints 20] [--output-dir DIR]

Records are those of a training, with validation every thousandth. A repaint follows one new record and redraws every
panel and the status; the browser's part is not in it. Its CPU time is what it would take on an idle core. What is sent
is the data of all plots, of which a browser gets those that changed. Writes monitor.json and monitor.md.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from benchmarks import report
from workbench.monitor import Monitor

RECORDS = (1_000, 10_000, 100_000, 1_000_000)


def line(i: int, rng: random.Random) -> str:
    record: dict[str, Any] = {"iteration": i, "loss": 1 / (1 + i / 1000) + rng.gauss(0, 0.1), "lr": 1e-3 / i**0.5}
    record |= {"grad_norm": rng.random(), "tokens": 2048, "tokens_per_s": 7000 + 500 * rng.random()}
    record |= {"elapsed_s": 0.3 * i, "tflops_per_s": 0.1 * rng.random(), "samples": 74 * i}
    text = json.dumps(record) + "\n"
    if i % 1000 == 0:
        levels = [rng.random() for _ in range(8)]
        sigmas = [0.1 * 2**k for k in range(8)]
        text += json.dumps({"iteration": i, "val_loss": 0.5, "val_loss_by_sigma": levels, "val_sigmas": sigmas}) + "\n"
    return text


def measure(records: int, repaints: int) -> dict[str, Any]:
    """Seconds to open, seconds of each repaint and their CPU time, bytes sent and held."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "metrics.jsonl"
        with file.open("w") as out:
            out.writelines(line(i, rng) for i in range(1, records + 1))
        before = psutil.Process().memory_info().rss
        monitor, began = Monitor(place), time.perf_counter()
        monitor.widget  # noqa: B018
        monitor.close()
        monitor._thread.join()
        opened_s = time.perf_counter() - began
        held = psutil.Process().memory_info().rss - before
        took, cpu = [], []
        for i in range(records + 1, records + 1 + repaints):
            with file.open("a") as out:
                out.write(line(i, rng))
            began, used = time.perf_counter(), time.thread_time()
            assert monitor.read() == 1 + (i % 1000 == 0)
            monitor.paint()
            took.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - used)
        sent = len(json.dumps([plot.data for plot in monitor.plots]))
    return {"records": records, "opened_s": opened_s, "held": held, "repaint_s": took, "cpu_s": cpu, "sent": sent}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=RECORDS)
    parser.add_argument("--repaints", type=int, default=20)
    parser.add_argument("--output-dir", type=Path, default=report.RESULTS)
    args = parser.parse_args(argv)
    about = report.machine()
    found = [measure(n, args.repaints) for n in args.records]
    head = ["records", "opened, s", "repaint, ms", "its CPU time, ms", "data of all plots, kB", "process grew, MiB"]
    rows = []
    for r in found:
        repaint, cpu = (
            "{:.1f} ({:.1f} - {:.1f})".format(*(1000 * s for s in report.spread(r[k]))) for k in ("repaint_s", "cpu_s")
        )
        rows.append(
            [
                f"{r['records']:,}",
                f"{r['opened_s']:.1f}",
                repaint,
                cpu,
                f"{r['sent'] / 1e3:.0f}",
                f"{r['held'] / 2**20:.0f}",
            ]
        )
    text = (
        f"# The monitor's repaint\n\nWritten by `benchmarks/monitor.py`: median (least - greatest) of {args.repaints} "
        f"repaints. {report.sentence(about)}.\n\n{report.table(head, rows)}"
    )
    report.save("monitor", {"machine": about, "measured": found}, text, args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
