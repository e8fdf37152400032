"""The CUDA benchmark: training steps on one GPU, eager, as one CUDA graph, and with compiled layers.

    python benchmarks/bench_gpu.py [--cases DiT-XL,graph] [--profile]
    python benchmarks/bench_gpu.py --device cpu --smoke        the same code on a tiny size, to see that it runs

It measures tokens/s, TFLOP/s, MFU and memory, prints a table and writes benchmarks/results/bench_gpu.{json,md} after
each case. Packs are random latents of pictures and a short clip with 128 caption tokens. It runs from a bare checkout:
the package need not be installed, its dependencies must be.

`CASES` has the cases, the most telling first: a size, a pack length, the number of heads, and how a step runs. A step
is forward, backward, fused AdamW in bf16 with fp32 master weights, and averages. DiT-7B runs with as many of its layers
as memory allows, and says how many. Attention is FlashAttention 3 where its package is installed; a row says so.

FLOPs are `counts.model_flops`: true segment lengths, recomputation not counted. MFU is against the dense bf16 peak in
`sizes.PEAK_FLOPS`; a GPU that is not listed there gets none. The step is timed on three packs that it has seen before,
and on packs that it has not.

Every case is a process of its own with a time limit. One that dies, runs out of memory or hangs becomes a row with the
reason. The others go on, and the exit code is then 1. Without CUDA the exit code is 2. `--profile` adds where the
GPU's time goes in a step of the first case. After `--budget-s` seconds no new case starts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import report
from dfm_nb.config.sizes import PEAK_FLOPS, peak_flops

MIX = [[1, 64, 64], [5, 32, 32], [1, 48, 64], [1, 32, 32]]
"""Latents (T, H, W) of 1024, 1280, 768 and 256 tokens.

They are a picture of 512 px, a clip of 17 frames of 256 px, and pictures of 384 x 512 and 256 px.
"""
SMOKE_MIX = [[1, 8, 8], [3, 8, 8], [1, 8, 12]]
CASES = (
    ("DiT-XL", 16_384, None, "eager"),
    ("DiT-XL", 16_384, None, "graph and compiled"),
    ("DiT-XL", 16_384, 9, "graph and compiled"),  # heads of 128 channels; DiT-XL's have 72
    ("DiT-XL", 16_384, None, "graph"),
    ("DiT-7B", 8_192, None, "graph and compiled"),
    ("DiT-7B", 8_192, None, "eager"),
    ("DiT-XL", 8_192, None, "graph and compiled"),
    ("DiT-XL", 8_192, None, "graph"),
    ("DiT-7B", 8_192, None, "graph"),
)
"""Size, tokens of a pack, attention heads (None: the size's own), and how a step runs."""
BYTES_PER_PARAMETER = 18
"""bf16 weight; fp32 gradient, master weight and two moments."""


def layers_that_fit(memory_bytes: float, parameters_per_layer: float, tokens: int, width: int, most: int) -> int:
    """Layers of a stack that takes three quarters of the memory; at least one, not over `most`.

    A layer takes its optimizer states, and about 50 bytes of activations a token and channel.
    """
    per_layer = BYTES_PER_PARAMETER * parameters_per_layer + 50 * tokens * width
    return max(1, min(most, int(0.75 * memory_bytes / per_layer)))


# ---- one case, in a process of its own -----------------------------------------------------------------------------


def settings(case: dict[str, Any]) -> list[str]:
    """Overrides of the configuration for a case."""
    mix = SMOKE_MIX if case["smoke"] else MIX
    out = [
        f"model.size={case['size']}",
        "model.in_channels=16",
        "model.text_dim=1024",
        "model.sigma_data=0.5",
        "mixed_precision=bf16",
        "dataset.mock=true",
        f"dataset.mock_latent_sizes={json.dumps(mix)}",
        "dataset.mock_text_tokens=128",
        f"dataset.task_encoder_seq_length={case['tokens']}",
        "dataset.packing_buffer_size=40",
        "dataset.num_workers=0",
        "train.global_batch_size=1",
        "train.train_iters=1000",
        "scheduler.lr_warmup_iters=1",
        f"model.compile={json.dumps('compiled' in case['step'] and case['device'] == 'cuda')}",
        f"model.cuda_graph={json.dumps('graph' in case['step'])}",
        "optimizer.use_distributed_optimizer=false",
    ]
    return out + [f"model.{name}={case[name]}" for name in ("num_layers", "num_attention_heads") if case.get(name)]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Build the model, take steps, time them.

    Seconds of a step are medians. Memory is the allocator's peak; on a CPU the resident set's.
    """
    import torch

    from dfm_nb import config as cfg
    from dfm_nb import parallel
    from dfm_nb.config import counts, sizes
    from dfm_nb.training.batches import open_store, packed_loader
    from dfm_nb.training.trainer import Trainer

    cuda = case["device"] == "cuda"
    parallel.init()
    shape = sizes.SIZES[case["size"]]
    if cuda and case["size"] == "DiT-7B":
        whole = cfg.resolve(None, overrides=settings(case)).config
        per_layer = counts.layer_parameter_count(whole.model)
        memory = torch.cuda.get_device_properties(0).total_memory
        case["num_layers"] = layers_that_fit(
            memory, per_layer, case["tokens"], shape["hidden_size"], shape["num_layers"]
        )
    config = cfg.resolve(None, overrides=settings(case)).config
    trainer = Trainer(config)
    if "compiled" in case["step"] and not cuda:
        for layer in trainer.chunks[0].decoder.layers:
            layer.compiled = torch.compile(type(layer).inner, backend="aot_eager")
    loader = packed_loader(config, open_store(config), 0, 1)
    packs = [loader.next_step() for _ in range(3)]  # made beforehand: the loader is not what is measured
    unseen = [loader.next_step() for _ in range(2)]

    def timed(function) -> float:
        begun = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    first_s = timed(lambda: trainer.step(packs[0]))
    for i in range(case["warmup"]):
        trainer.step(packs[i % 3])
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    step_s = [timed(lambda i=i: trainer.step(packs[i % 3])) for i in range(case["steps"])]
    peak_bytes = torch.cuda.max_memory_allocated() if cuda else _resident_peak()
    backward_s = [timed(lambda i=i: trainer.backward(packs[i % 3])) for i in range(min(3, case["steps"]))]
    unseen_s = [timed(lambda p=p: trainer.step(p)) for p in unseen]
    flops = [counts.model_flops(config.model, *pack.lengths()) for (pack,) in packs]
    used = [flops[i % 3] / s for i, s in enumerate(step_s)]
    name = torch.cuda.get_device_name() if cuda else report.processor()
    peak = peak_flops(name) if cuda else None
    out = {
        "gpu": name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "num_layers": config.model.num_layers,
        "parameters": counts.parameter_count(config.model),
        "attention": attention_of(trainer.model_config.packed_attention_backend),
        "step_s": statistics.median(step_s),
        "each_step_s": step_s,
        "first_step_s": first_s,
        "forward_backward_s": statistics.median(backward_s),
        "unseen_pack_step_s": statistics.median(unseen_s),
        "tokens_per_s": statistics.median(packs[i % 3][0].num_tokens / s for i, s in enumerate(step_s)),
        "tflops_per_s": statistics.median(used) / 1e12,
        "mfu": statistics.median(used) / peak if peak else None,
        "peak_bytes": peak_bytes,
    }
    if case["profile"]:
        out["time_by_kernel"] = profile(lambda: trainer.step(packs[0]), cuda)
    parallel.shutdown()
    return out


def attention_of(backend: str) -> str:
    """The back end, and torch's FlashAttention if it is not its own."""
    from torch.nn import attention

    active = getattr(attention, "current_flash_attention_impl", lambda: None)()  # older torch has one version alone
    return f"{backend}, {active}" if active else backend


def _resident_peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def profile(step, cuda: bool) -> dict[str, Any]:
    """Where the device's time goes in one step.

    Returns milliseconds of the 25 longest kernels (on a CPU, operators), of all of them, and of the whole step: the
    rest is how long the device idles.
    """
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with torch.profiler.profile(activities=activities) as recorded:
        begun = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - begun)
    wanted = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    rows = []
    for event in recorded.key_averages():
        if event.device_type == wanted and not event.is_user_annotation:  # ranges would count their kernels twice
            micros = event.self_device_time_total if cuda else event.self_cpu_time_total
            rows.append({"name": event.key[:120], "ms": micros / 1e3, "calls": event.count})
    rows.sort(key=lambda r: -r["ms"])
    busy_ms = sum(r["ms"] for r in rows)
    return {"wall_ms": wall_ms, "busy_ms": busy_ms, "longest": rows[:25]}


def child(case: dict[str, Any]) -> int:
    """Print the measurement, or that memory ran out, as one JSON line."""
    import torch

    try:
        result = measure(case)
    except torch.cuda.OutOfMemoryError as error:
        result = {"failed": "out of memory: " + str(error).split("\n")[0][:200]}
    print(json.dumps(result))
    return 0


# ---- the set -----------------------------------------------------------------------------------------------------


def cases(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Those of `CASES` whose size or way of a step is asked for; the first one is profiled."""
    wanted = [("tiny", 128, None, step) for step in ("eager", "graph", "graph and compiled")] if args.smoke else CASES
    out = []
    for size, tokens, heads, step in wanted:
        case = {"device": args.device, "smoke": args.smoke, "warmup": 3, "steps": 2 if args.smoke else args.steps}
        case |= {"size": size, "tokens": tokens, "num_attention_heads": heads, "step": step}
        case["profile"] = args.profile and not out
        if args.smoke or not args.cases or {size, step} & set(args.cases.split(",")):
            out.append(case)
    return out


def run_case(case: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """The case with its measurement, or with `failed`, the reason."""
    argv = [sys.executable, str(Path(__file__).resolve()), "--case", json.dumps(case)]
    with tempfile.TemporaryFile("w+") as said:
        try:
            done = subprocess.run(
                argv, stdout=subprocess.PIPE, stderr=said, text=True, timeout=limit_s, env={**os.environ}
            )
        except subprocess.TimeoutExpired:
            return {**case, "failed": f"not done after {limit_s:.0f} s"}
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            return {**case, **json.loads(lines[-1])}
        said.seek(0)
        last = [line for line in said.read().splitlines() if line.strip()][-1:] or [f"exit code {done.returncode}"]
        return {**case, "failed": last[0][:300]}


def text(rows: list[dict], about: dict) -> str:
    cells = []
    for r in rows:
        size = r["size"]
        if size == "DiT-7B" and "num_layers" in r:
            size += f" ({r['num_layers']} layers)"
        if r["num_attention_heads"]:
            size += f", {r['num_attention_heads']} heads"
        if "step_s" in r:
            found = [f"{1e3 * r['step_s']:,.1f}", f"{1e3 * r['unseen_pack_step_s']:,.1f}", f"{r['tokens_per_s']:,.0f}"]
            mfu = f"{r['mfu']:.1%}" if r["mfu"] is not None else ""
            found += [f"{r['tflops_per_s']:,.4g}", mfu, f"{r['peak_bytes'] / 2**30:.1f}"]
        else:
            found = ["failed: " + r["failed"], *[""] * 5]
        cells.append([size, f"{r['tokens']:,}", r.get("attention", ""), r["step"], *found])
    gpu = next(
        (f"{r['gpu']}, CUDA {r['cuda']}, " for r in rows if "gpu" in r and r["device"] == "cuda"),
        "no GPU: a smoke run on the CPU, ",
    )
    head = ["size", "tokens", "attention", "step", "ms a step", "on a new pack", "tokens/s", "TFLOP/s", "MFU"]
    lines = [f"bf16 training steps on one device: {gpu}{report.sentence(about)}.", ""]
    lines.append(report.table([*head, "peak GiB"], cells))
    for r in (r for r in rows if "time_by_kernel" in r):
        p = r["time_by_kernel"]
        lines += [
            "",
            f"A step of {r['size']} at {r['tokens']:,} tokens, {r['step']}: "
            f"{p['wall_ms']:.1f} ms, of which the device was busy {p['busy_ms']:.1f} ms. Longest:",
            "",
        ]
        longest = [[e["name"].replace("|", "/"), f"{e['ms']:.2f}", e["calls"]] for e in p["longest"][:12]]
        lines.append(report.table(["kernel", "ms", "calls"], longest))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(
        __doc__,
        cases=("", "sizes or ways of a step, separated by commas; empty: all"),
        steps=(10, "timed, after three that are not"),
        case_limit_s=90.0,
        budget_s=(480.0, "no new case after that many seconds"),
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--profile", action="store_true", help="also where the time of a step goes")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.case:
        return child(json.loads(args.case))
    if args.device == "cpu" and not args.smoke:
        parser.error("--device cpu runs with --smoke only")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "error: this benchmark needs a CUDA device and torch sees none; "
            "--device cpu --smoke runs its code on tiny sizes",
            file=sys.stderr,
        )
        return 2
    from tqdm import tqdm

    about, begun, rows = report.machine(), time.monotonic(), []
    todo = cases(args)
    for case in tqdm(todo, desc="cases", disable=None):
        if time.monotonic() - begun > args.budget_s:
            rows.append({**case, "failed": f"not started: the budget of {args.budget_s:.0f} s is spent"})
            continue
        rows.append(run_case(case, args.case_limit_s))
        if args.smoke and args.output_dir == report.RESULTS:  # of a smoke run nothing is kept unless asked for
            continue
        result = {"machine": about, "peaks": PEAK_FLOPS, "rows": rows}
        report.write("bench_gpu", result, text(rows, about), args.output_dir)
    print(text(rows, about))
    failed = [r for r in rows if "failed" in r]
    print(f"{len(rows) - len(failed)} of {len(rows)} cases ran, {len(failed)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
