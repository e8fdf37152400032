"""Memory that `dfm plan` estimates against the peak of real training steps, on CPU.

    python benchmarks/plan_memory.py [--cases "DiT-S,1024,none,fp32 DiT-S,1024,full,bf16"]

Each case is a fresh process. Imports and a step of a tiny model come first, because libraries load their kernels
then. The resident set is read, the peak counter is reset, and the model is built and takes two steps on mock packs;
the optimizer's state exists from the first on. Measured: peak minus the resident set before. glibc gives every freed
block of 64 KiB or more back to the system (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_), so that the resident
set is what is held and not what was. As a check on that, a second process reads the peak of torch's CPU allocator
from the profiler's memory events, which counts tensors alone.

Writes benchmarks/results/plan_memory.{json,md} after each case, and keeps the cases that are there. Fails when an
estimate is more than 15 % off.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report

TOLERANCE = 0.15
STEPS = 2
CASES = (
    "demo,1024,none,fp32 demo,1024,full,fp32 demo,4096,none,fp32 demo,4096,full,fp32 "
    "DiT-S,1024,none,fp32 DiT-S,1024,selective,fp32 DiT-S,1024,full,fp32 DiT-S,1024,none,bf16 DiT-S,1024,full,bf16 "
    "DiT-S,4096,none,fp32 DiT-S,4096,full,fp32 DiT-B,1024,none,fp32 DiT-B,1024,full,fp32 DiT-L,512,full,fp32 "
    "Wan-1.3B+num_layers=2+text_padding=16,4096,none,fp32 Wan-1.3B+num_layers=2+text_padding=16,4096,full,fp32 "
    "Wan-1.3B+num_layers=2+text_padding=16+lora.rank=16,4096,none,bf16 "
    "Wan-1.3B+num_layers=6+text_padding=16+lora.rank=16,4096,full,bf16"
)
"""size and settings of the model joined by +, tokens of a pack, recompute, precision"""


def settings(size: str, tokens: int, recompute: str, precision: str = "fp32") -> list[str]:
    size, *changes = size.split("+")
    return [
        f"model.size={size}",
        *(f"model.{change}" for change in changes),
        f"mixed_precision={precision}",
        *"dataset.mock=true dataset.mock_latent_sizes=[[1,8,8],[3,8,8],[1,12,8]] dataset.mock_text_tokens=12".split(),
        "model.in_channels=16",
        "model.text_dim=384",
        "model.sigma_data=0.5",
        f"dataset.task_encoder_seq_length={tokens}",
        "train.global_batch_size=1",
        "train.caption_dropout=0",
        f"model.recompute_granularity={'null' if recompute == 'none' else recompute}",
    ]


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def take_steps(overrides: list[str], steps: int):
    """Build a trainer and take steps on one mock pack; returns (configuration, pack, number of runs)."""
    from dfm_nb import config as cfg
    from dfm_nb.data.loader import build_pack
    from dfm_nb.data.order import PackOrder
    from dfm_nb.model.attention import SegmentBounds
    from dfm_nb.training.batches import open_store, pack_settings
    from dfm_nb.training.trainer import Trainer

    config = cfg.resolve(None, overrides=overrides).config
    store = open_store(config)
    order = PackOrder(store, pack_settings(config), config.dataset.task_encoder_seq_length, 64)
    pack = build_pack(order, order.next())
    trainer = Trainer(config)
    for _ in range(steps):
        assert not trainer.step([pack]).skipped
    return config, pack, len(SegmentBounds(pack.cu_q, pack.cu_q).calls.runs)


def measure(size: str, tokens: int, recompute: str, precision: str, kind: str) -> dict:
    """In this process; see the module's header. kind : "resident" or "allocated"."""
    import torch

    from dfm_nb import parallel
    from dfm_nb.config.counts import parameter_count
    from dfm_nb.model import attention
    from dfm_nb.planning.layouts import GpuLayout, Load
    from dfm_nb.planning.training_memory import training_bytes

    torch.set_num_threads(1)
    attention.FLOAT32_BELOW = 0  # the estimate is of GPUs, where bfloat16 stays bfloat16
    parallel.init()
    take_steps(settings("tiny", 64, recompute, precision), 1)
    wanted = settings(size, tokens, recompute, precision)
    if kind == "allocated":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            take_steps(wanted, STEPS)
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
        return {"allocated": max(e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]")}
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counter starts again
    config, pack, runs = take_steps(wanted, STEPS)
    peak = resident("VmHWM") - before
    samples, number = len(pack.keys), 4 if precision == "fp32" else 2
    load = Load(tokens, samples, round(len(pack.text) / samples), 1, number, len(config.ema.sigma_rels), True, runs)
    held = training_bytes(config.model, GpuLayout(recompute=recompute), load)
    estimate = sum(held.values())
    parallel.shutdown()
    return {
        "size": size,
        "tokens": tokens,
        "recompute": recompute,
        "precision": precision,
        "parameters": parameter_count(config.model),
        "measured": peak,
        "estimate": estimate,
        "activations": held["activations"],
        "error": estimate / peak - 1,
    }


def run_case(size: str, tokens: int, recompute: str, precision: str = "fp32", kind: str = "resident") -> dict:
    """`measure` in a fresh process."""
    argv = [__file__, "--case", f"{size},{tokens},{recompute},{precision},{kind}"]
    said, _ = report.of_process(argv, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536")
    return json.loads(said.splitlines()[-1])


def table(rows: list[dict], about: dict) -> str:
    heads = ["model", "tokens", "precision", "recompute", "resident", "tensors alone", "estimate", "of it activations"]
    cells = []
    for r in rows:
        gib = [f"{r[k] / (1 << 30):.3f}" for k in ("measured", "allocated", "estimate", "activations")]
        case = [r[k] for k in ("size", "tokens", "precision", "recompute")]
        cells.append([*case, *gib, f"{r['error']:+.1%}"])
    return (
        f"Peak GiB of {STEPS} training steps, one CPU process, a fresh process per case. {report.sentence(about)}.\n\n"
        + report.table([*heads, "estimate / resident - 1"], cells)
    )


def main() -> int:
    parser = report.arguments(__doc__, cases=(CASES, "size,tokens,recompute,precision, with spaces between cases"))
    parser.add_argument("--again", action="store_true", help="measure the cases again; others stay as they are")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        size, tokens, recompute, precision, kind = args.case.split(",")
        print(json.dumps(measure(size, int(tokens), recompute, precision, kind)))
        return 0
    path, about = args.output_dir / "plan_memory.json", report.machine()
    rows = json.loads(path.read_text())["cases"] if path.exists() else []
    key = lambda r: f"{r['size']},{r['tokens']},{r['recompute']},{r['precision']}"  # noqa: E731
    asked = args.cases.split()
    if args.again:
        rows = [r for r in rows if key(r) not in asked]
    for text in [case for case in asked if case not in set(map(key, rows))]:
        size, tokens, recompute, precision = text.split(",")
        case = (size, int(tokens), recompute, precision)
        rows.append(run_case(*case) | run_case(*case, "allocated"))
        print(text, f"{rows[-1]['error']:+.1%}", file=sys.stderr, flush=True)
        report.write("plan_memory", {"machine": about, "cases": rows}, table(rows, about), args.output_dir)
    print(table(rows, about))
    bad = [r for r in rows if abs(r["error"]) > TOLERANCE]
    print(f"{len(rows) - len(bad)} passed, {len(bad)} failed")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
