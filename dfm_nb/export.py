"""`dfm export`: consolidated weights from a run or checkpoint, in one process whatever layout they were trained in.

It writes `model.safetensors` or `model.pth` (a plain dict of tensors, loadable with `weights_only`), `config.yaml`
and `config.json`, and the data set's small files that generation needs. Low-rank updates are added to their weights,
or left apart in `model.lora.safetensors` beside the base: generation reads either.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

import torch
from torch import nn

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base.argv import ArgumentParser, guard
from dfm_nb.base.files import replacing, write_atomically
from dfm_nb.checkpoints import saving
from dfm_nb.checkpoints import weights as checkpoint
from dfm_nb.model import ema
from dfm_nb.model.build import build_chunks
from dfm_nb.model.linear import is_lora, merged


def parse(argv: list[str] | None) -> argparse.Namespace:
    p = ArgumentParser(prog="dfm export", description="Write consolidated weights.")
    p.add_argument("source", help="run folder or iter_* folder")
    p.add_argument("--output", required=True, help="FILE.safetensors or FILE.pth")
    p.add_argument(
        "--ema-sigma-rel", type=float, help="relative length of the weight average; rebuilt from the stored ones"
    )
    p.add_argument("--raw", action="store_true", help="the weights themselves instead of an average")
    p.add_argument(
        "--lora",
        choices=("merged", "apart"),
        default="merged",
        help="low-rank updates: added to their weights, or in a file of their own beside the base's",
    )
    return p.parse_args(argv)


def averaged(source: checkpoint.Weights, chunks: Sequence[nn.Module], sigma_rel: float) -> None:
    """Load the average of length `sigma_rel`: a stored one, or rebuilt from all stored ones of the run (post-hoc EMA).

    Karras et al. 2024 (EDM2), Sec. 3: any average is nearly a linear combination of stored ones.
    """
    lengths = list(source.config.ema.sigma_rels)
    if sigma_rel in lengths:
        source.load(chunks, sigma_rel)
        return
    if not lengths:
        raise ValueError(f"{source.folder} stores no averages (ema.sigma_rels is empty); use --raw")
    for folder in checkpoint.whole_checkpoints(source.folder.parent):
        if folder != source.folder:  # that one has been verified
            checkpoint.verify(folder)
    steps = {f: saving.read_state(f)["steps_taken"] for f in checkpoint.whole_checkpoints(source.folder.parent)}
    last = steps[source.folder]
    stored = [(t, length, folder) for folder, t in steps.items() for length in lengths if 0 < t <= last]
    weights = ema.combine_weights([(t, length) for t, length, _ in stored], (last, sigma_rel))
    lora = bool(source.config.model.lora.rank)  # then the averages are of the low-rank updates alone
    trained = [p for c in chunks for name, p in c.named_parameters() if is_lora(name) == lora]
    total = [torch.zeros_like(p, dtype=torch.float64) for p in trained]
    for weight, (_, length, folder) in zip(weights, stored):
        checkpoint.load_weights(chunks, folder, length, lora)
        torch._foreach_add_(total, [p.detach().double() for p in trained], alpha=float(weight))
    with torch.no_grad():
        for p, value in zip(trained, total):
            p.copy_(value)


def write_tensors(tensors: dict[str, torch.Tensor], output: Path) -> None:
    """One file, whole or absent."""
    with replacing(output) as temporary:
        if output.suffix == ".safetensors":
            from safetensors.torch import save_file

            save_file(tensors, temporary)
        else:
            torch.save(tensors, temporary)
    count = sum(t.numel() for t in tensors.values())
    print(f"[INFO] wrote {output}: {len(tensors)} tensors, {count / 1e6:.2f} M parameters")


def write_weights(tensors: dict[str, torch.Tensor], output: Path, model: cfg.ModelConfig, lora: str) -> None:
    """Write `output`, with low-rank updates merged into it or (lora="apart") in a file beside it.

    `model` is changed to describe the result.
    """
    if model.lora.rank and lora == "apart":
        write_tensors({n: t for n, t in tensors.items() if is_lora(n)}, checkpoint.lora_file(output))
        tensors = {n: t for n, t in tensors.items() if not is_lora(n)}
    elif model.lora.rank:
        tensors = merged(tensors, (model.lora.alpha or model.lora.rank) / model.lora.rank)
        model.lora.rank = model.lora.alpha = None
    write_tensors(tensors, output)


def check_folder(output: Path, model: cfg.ModelConfig, lora: str) -> None:
    """ValueError when the folder has weights of another model: its config.yaml can describe one only."""
    ours = {output.name, checkpoint.lora_file(output).name}
    others = [p.name for s in (".safetensors", ".pth") for p in output.parent.glob(f"*{s}") if p.name not in ours]
    others = [n for n in others if n not in checkpoint.ASSETS]
    beside = output.parent / "config.yaml"
    if not others or not beside.is_file():
        return
    there = cfg.from_yaml(beside).config.model
    keeps = there.lora.rank == (model.lora.rank if lora == "apart" else None)
    if not keeps or any(attrgetter(k)(there) != attrgetter(k)(model) for k in checkpoint.SHAPES):
        raise ValueError(
            f"{output.parent} holds {others[0]} of another model, and its config.yaml is for that; "
            "choose another folder"
        )


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    output = Path(args.output)
    if output.suffix not in (".safetensors", ".pth"):
        raise ValueError(f"--output must end in .safetensors or .pth; got {output}")
    source = checkpoint.find_weights(args.source)
    provenance = cfg.from_yaml(source.folder / "config.yaml").provenance
    model = source.config.model
    check_folder(output, model, args.lora)
    model.tensor_model_parallel_size = model.pipeline_model_parallel_size = model.context_parallel_size = 1
    model.virtual_pipeline_model_parallel_size, model.sequence_parallel = None, False
    parallel.init()
    _, chunks = build_chunks(model, "fp32", seed=0)
    if args.raw:
        source.load(chunks, None)
    elif args.ema_sigma_rel:
        averaged(source, chunks, args.ema_sigma_rel)
    else:
        source.load(chunks, "auto")
    tensors = {name: t.contiguous() for name, t in checkpoint.gather_whole(chunks).items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_weights(tensors, output, model, args.lora)
    if output.parent.resolve() != source.folder.resolve():
        for name, content in checkpoint.read_assets(source.folder).items():
            write_atomically(output.with_name(name), content)
    settings = cfg.to_yaml(cfg.Resolved(source.config, provenance))
    write_atomically(output.with_name("config.yaml"), settings.encode())
    settings = json.dumps({"model": model.model_dump()}, indent=1)
    write_atomically(output.with_name("config.json"), settings.encode())
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
