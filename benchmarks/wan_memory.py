"""Memory that `dfm import` and `dfm export` of Wan need, against the size of its files.

    python benchmarks/wan_memory.py [--sizes "Wan-tiny Wan-1.3B"] [--runs "Wan-tiny Wan-1.3B+num_layers=4"]

Each size is written as diffusers keeps it: random bfloat16 weights by diffusers' names, in its shapes and its files of
5 GB. It is imported, opened with its checksum as generation does, and exported again; all tensors must come back bit
for bit. Each of `--runs` is a network that takes one training step on a mock pack; its checkpoint is exported.

Each step is a process of its own, whose anonymous memory (RssAnon) is read every 5 ms. Pages of files, which the system
drops when it needs room, are not in it. The first size and the first run should be tiny: what they need is Python and
the libraries.

Writes benchmarks/results/wan_memory.{json,md}. Files go to `--work`, which needs three times the largest size. Fails
when a step needs more than in the first size and `--tensors` times the largest tensor.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
from safetensors import safe_open

from benchmarks import report
from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.checkpoints import exported, tensor_files, wan_folder
from dfm_nb.model.build import on_meta

OPEN = "import sys; from dfm_nb.checkpoints.weights import find_weights; find_weights(sys.argv[1])"
SIZES = "Wan-tiny Wan-1.3B Wan-1.3B+num_layers=60"
RUNS = "Wan-tiny Wan-1.3B+num_layers=1 Wan-1.3B+num_layers=4"
"""Size and settings of the model joined by +."""


def settings(size: str) -> list[str]:
    name, *changes = size.split("+")
    return [f"model.{s}" for s in (f"size={name}", "in_channels=16", "text_dim=4096", *changes)]


def write(model: cfg.ModelConfig, folder: Path) -> None:
    """A Wan of random weights as diffusers keeps it: of the pipeline, the parts that `dfm import` reads."""
    from diffusers import WanTransformer3DModel
    from huggingface_hub import split_torch_state_dict_into_shards

    sizes = {theirs: getattr(model, ours) for theirs, ours in wan_folder.SIZES.items()}
    with torch.device("meta"):
        network = WanTransformer3DModel(**sizes, attention_head_dim=model.hidden_size // model.num_attention_heads)
    state = network.to(torch.bfloat16).state_dict()
    places = {name: i for i, name in enumerate(state)}
    count = max(t.numel() for t in state.values()) + len(state)
    numbers = torch.randint(0x3F80, (count,), dtype=torch.int16).view(torch.bfloat16)  # from 0 to 1

    def one(name: str) -> torch.Tensor:
        """Each begins at a number of its own, so that no two are the same."""
        return numbers[places[name] :][: state[name].numel()].view(state[name].shape)

    to = folder / "transformer"
    to.mkdir(parents=True)
    pattern = wan_folder.STEM + "{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(state, filename_pattern=pattern, max_shard_size="5GB")
    for file, names in split.filename_to_tensors.items():
        tensor_files.write(to / file, exported.Lazy(names, one), {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (to / f"{wan_folder.STEM}.safetensors.index.json").write_text(json.dumps(index))
    network.save_config(to)
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps({"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}))


def check_bits(before: Path, after: Path) -> int:
    """The number of tensors, if all are the same."""
    one, two = (
        {
            name: f
            for f in (safe_open(file, "pt") for file in (d / "transformer").glob("*.safetensors"))
            for name in f.keys()
        }
        for d in (before, after)
    )
    if one.keys() != two.keys():
        raise RuntimeError(f"{before} and {after} have different tensors: {sorted(one.keys() ^ two.keys())[:3]}")
    for name in one:
        a, b = one[name].get_tensor(name), two[name].get_tensor(name)
        if a.dtype != b.dtype or not torch.equal(a.view(torch.int16), b.view(torch.int16)):
            raise RuntimeError(f"{name} did not come back bit for bit")
    return len(one)


def anonymous(process: psutil.Process) -> int:
    """Bytes of a process's anonymous memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon")), 0)


def measured(step: str, argv: list[str | Path]) -> dict:
    """Seconds of a process, and the bytes of its largest anonymous memory."""
    begun = time.perf_counter()
    _, peak = report.of_process(argv, anonymous, 0.005)
    print(f"[INFO] {step}: {peak / 1e6:.0f} MB", file=sys.stderr, flush=True)
    return {"step": step, "seconds": time.perf_counter() - begun, "peak": peak}


def bytes_of(path: Path, pattern: str = "*") -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob(pattern) if f.is_file())


def there_and_back(size: str, place: Path) -> dict:
    model = cfg.resolve(None, overrides=settings(size)).config.model
    theirs, ours, back = (place / part for part in ("theirs", "model.safetensors", "back"))
    write(model, theirs)
    steps = [
        measured("import", ["-m", "dfm_nb", "import", theirs, "--output", ours]),
        measured("open", ["-c", OPEN, ours]),
        measured("export", ["-m", "dfm_nb", "export", ours, "--format", "diffusers", "--output", back]),
    ]
    largest = max(2 * p.numel() for p in on_meta(model).parameters())
    tensors = check_bits(theirs, back)
    return {"size": size, "bytes": bytes_of(ours), "largest": largest, "tensors": tensors, "steps": steps}


def of_a_run(size: str, place: Path) -> dict:
    run, out = place / "run", place / "model.safetensors"
    mock = ["dataset.mock=true", "dataset.task_encoder_seq_length=256", "train.global_batch_size=1"]
    once = ["train.train_iters=1", "mixed_precision=fp32", "model.recompute_granularity=full"]
    measured(f"training of {size}", ["-m", "dfm_nb", "pretrain", "--run-dir", run, *settings(size), *mock, *once])
    steps = [measured("export of a run", ["-m", "dfm_nb", "export", run, "--output", out])]
    model = cfg.resolve(None, overrides=settings(size)).config.model
    largest = max(4 * p.numel() for p in on_meta(model).parameters())
    return {"size": size, "bytes": bytes_of(run / "checkpoints"), "largest": largest, "steps": steps}


def text(result: dict) -> str:
    rows = [
        [c["size"], f"{c['bytes'] / 1e9:.3f}", f"{c['largest'] / 1e6:.0f}", s["step"]]
        + [f"{s['peak'] / 1e6:.0f}", f"{s['more'] / 1e6:+.0f}", f"{s['seconds']:.0f}"]
        for c in result["cases"]
        for s in c["steps"]
    ]
    return "\n".join(
        [
            "Peak anonymous memory of `dfm import` and `dfm export` of random Wans, one process each. Sizes with other "
            "layers than the published ones say so.",
            "All tensors of an import and its export are those of the file, bit for bit. A run's file is the "
            "checkpoint, with averages and the optimizer.",
            f"{report.sentence(result['machine'])}.",
            "",
            report.table(
                ["size", "file, GB", "largest tensor, MB", "step", "peak, MB", "more than the first, MB", "s"], rows
            ),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    parser = report.arguments(
        __doc__,
        sizes=(SIZES, "size and settings of the model joined by +, in bfloat16"),
        runs=(RUNS, "the same, of runs whose checkpoint is exported"),
        tensors=(6.0, "largest tensors that a step may hold"),
    )
    parser.add_argument("--work", type=Path, help="folder for the files; by default the system's temporary one")
    args = parser.parse_args(argv)
    parallel.init()  # of this process, where networks are built without memory
    result: dict = {"machine": report.machine(), "cases": []}
    failed = []
    for case, sizes in ((there_and_back, args.sizes), (of_a_run, args.runs)):
        first: dict[str, int] = {}
        for size in sizes.split():
            with tempfile.TemporaryDirectory(prefix="wan_memory_", dir=args.work) as place:
                result["cases"].append(case(size, Path(place)))
            row = result["cases"][-1]
            for step in row["steps"]:
                step["more"] = step["peak"] - first.setdefault(step["step"], step["peak"])
                if step["more"] > args.tensors * row["largest"]:
                    failed.append(f"{step['step']} of {size}")
            report.write("wan_memory", result, text(result), args.output_dir)
    parallel.shutdown()
    print(text(result))
    print(f"not bounded: {', '.join(failed)}" if failed else "bounded", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
