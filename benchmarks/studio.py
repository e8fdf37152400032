"""How soon does the Studio's rough picture follow a moving slider, and how long does a move hold the kernel?

    python benchmarks/studio.py --checkpoint-path runs/demo/train [runs/student] [--moves 50]

Any checkpoint does: speed does not depend on the weights' values. Writes studio.json and studio.md. The process is
held to one core. A redraw is the time from a change of the seed in the kernel to the new picture in the widget: the
network's evaluations, the tokenizer's decoder, PNG and HTML. The way to the browser is not in it. A move is made when
the picture of the one before is there. CPU time is what it would take on an idle core. The handler is the part that
runs in the kernel's own thread. A few-step student's redraw is its finished clip.
"""

import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import report
from dfm_nb.generation.pipeline import Pipeline
from workbench.studio import Studio

SIZES = {"still": {}, "clip of 9 frames": {"num_video_frames": 9}}


def measure(pipe: Pipeline, moves: int, settings: dict) -> dict[str, list[float]]:
    """Seconds of `moves` redraws and of their handlers, and of 5 finished clips."""
    studio, pictured = Studio(pipe, folder=None, height=64, width=64, **settings), threading.Event()
    studio.draw()  # loads tokenizer and text encoder
    took: dict[str, list[float]] = {"redraw": [], "cpu": [], "handler": [], "finished": []}

    def shown(_change: object) -> None:
        if f"(seed {studio.controls['seed'].value}," in studio._image.value:
            pictured.set()

    studio._image.observe(shown, names="value")
    for move in range(moves):
        pictured.clear()
        began, cpu = time.perf_counter(), time.process_time()
        studio.controls["seed"].value = str(100 + move)
        took["handler"].append(time.perf_counter() - began)
        assert pictured.wait(60), studio.message
        took["redraw"].append(time.perf_counter() - began)
        took["cpu"].append(time.process_time() - cpu)
    studio.stop()
    for seed in range(2, 7):
        began = time.perf_counter()
        studio.draw(seed=seed)
        took["finished"].append(time.perf_counter() - began)
    return took


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(__doc__, moves=50)
    parser.add_argument("--checkpoint-path", required=True, nargs="+")
    args = parser.parse_args(argv)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    about = report.machine()
    took = {}
    for path in args.checkpoint_path:
        pipe = Pipeline.from_checkpoint(path)
        usual = "{num_steps} steps of {sampler}".format(**pipe.recommended)
        took |= {f"{name}, {usual}": measure(pipe, args.moves, settings) for name, settings in SIZES.items()}
    parameters = sum(p.numel() for chunk in pipe.chunks for p in chunk.parameters())

    def shown(seconds: list[float]) -> str:
        middle, least, most = (1000 * s for s in report.spread(seconds))
        digits = 0 if middle >= 10 else 1
        return f"{middle:.{digits}f} ({least:.{digits}f} - {most:.{digits}f})"

    head = ["64 x 64 px", "redraw", "its CPU time", "of it in the kernel's thread", "finished"]
    rows = [[name, *map(shown, of_size.values())] for name, of_size in took.items()]
    text = (
        f"# The Studio's redraw while a slider moves\n\nWritten by `benchmarks/studio.py`: a network of "
        f"{parameters / 1e6:.1f} M parameters, {pipe.config.mixed_precision}. Milliseconds, median (least - greatest) "
        f"of {args.moves} redraws and of 5 finished clips. {report.sentence(about)}.\n\n" + report.table(head, rows)
    )
    result = {"machine": about, "parameters": parameters, "seconds": took}
    report.save("studio", result, text, args.output_dir)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
