"""What does a command cost before its work begins? CPU and wall seconds of whole processes.

    python benchmarks/start_up.py [--rounds 5] [--old PATH]

Each round runs `import torch` alone and each item once, so that all meet the same load; figures are medians, written
after each round. `--old` is another checkout, whose items run in the same rounds. A training ends after its first step;
the CPU time is that of a rank, the wall time that of the command. Writes benchmarks/results/start_up.{json,md}. Takes
two minutes of an idle core, twice that with --old.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

FIRST_STEP = """
import os, sys, time
from dfm_nb.train import main
from dfm_nb.training import loop
def save(self):
    os.write(1, f"{time.process_time()}\\n".encode())
    os._exit(0)
loop.Training.save = save
main(sys.argv[1:])
"""
TRAINING = [
    "--dataset-path=data",
    "--model=tiny",
    "checkpoint.save_interval=1",
    "dataset.task_encoder_seq_length=256",
    "train.global_batch_size=2",
]
TORCHRUN = ["-m", "dfm_nb.base.torchrun", "--nproc-per-node=2"]
ITEMS = {  # what python runs, and the aim in CPU seconds
    "import dfm_nb": (["-c", "import dfm_nb"], "0.1"),
    "dfm --help": (["-m", "dfm_nb", "--help"], "0.1"),
    "from dfm_nb import Pipeline": (["-c", "from dfm_nb import Pipeline"], "torch + 1.0"),
    "dfm inspect --samples 0": (["-m", "dfm_nb", "inspect", "data", "--samples=0"], "torch + 0.3"),
    "first step": (["first_step.py", *TRAINING, "--run-dir=one"], "torch + 2.5"),
    "first step, a rank of two": ([*TORCHRUN, "first_step.py", *TRAINING, "--run-dir=two"], "torch + 2.5"),
}


def seconds(argv: list[str], tree: Path, place: str) -> tuple[float, float]:
    """CPU and wall seconds of `python ARGV`."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    ran = subprocess.run(
        [sys.executable, *argv], cwd=place, env=environment, capture_output=True, check=True, text=True
    )
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if any("first_step" in word for word in argv):
        return statistics.mean(float(line) for line in ran.stdout.splitlines() if line[:1].isdigit()), wall
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    asked = report.arguments(__doc__, rounds=5, old=("", "another checkout")).parse_args()
    trees = ({"before": Path(asked.old).resolve()} if asked.old else {}) | {"now": report.ROOT}
    about, found = report.machine(), {}
    with tempfile.TemporaryDirectory() as place:
        Path(place, "first_step.py").write_text(FIRST_STEP)
        prepare = ["-m", "dfm_nb", "prepare", "--output-dir=data", "--num-images=40", "--num-clips=8"]
        seconds(prepare, report.ROOT, place)
        for done in range(1, asked.rounds + 1):
            found.setdefault(("import torch", "now"), []).append(seconds(["-c", "import torch"], report.ROOT, place))
            for name, (argv, _) in ITEMS.items():
                for when, tree in trees.items():
                    found.setdefault((name, when), []).append(seconds(argv, tree, place))
            middle = {key: [statistics.median(column) for column in zip(*rows)] for key, rows in found.items()}
            torch_s, rows = middle["import torch", "now"][0], []
            for (name, when), (cpu, wall) in middle.items():
                aim = ITEMS[name][1] if name in ITEMS else ""
                rows.append((name, when, f"{cpu:.2f}", f"{cpu - torch_s:+.2f}", aim, f"{wall:.1f}"))
            head = ("item", "code", "CPU s", "less torch's", "aim", "wall s")
            lines = [{"item": name, "code": when, "cpu_wall_s": runs} for (name, when), runs in found.items()]
            text = f"# Start-up\n\n{report.sentence(about)}. Medians of {done} processes.\n\n{report.table(head, rows)}"
            report.save("start_up", {"machine": about, "runs": lines}, text, asked.output_dir)


if __name__ == "__main__":
    main()
