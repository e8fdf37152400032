"""`dfm export`: consolidated weights from a run or checkpoint, in one process whatever layout they were trained in.

Leaves: `model.safetensors` or `model.pth` (a plain dict of tensors, weights-only loadable), `config.yaml` and `config.json`, and the data
set's small files that generation needs (manifest, tokenizer, empty caption).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from omegaconf import OmegaConf

from dfm_nb import checkpoint, ema, parallel
from dfm_nb.argv import ArgumentParser, guard
from dfm_nb.runs import write_atomically
from dfm_nb.trainer import build_chunks


def parse(argv: list[str] | None):
    p = ArgumentParser(prog="dfm export", description="Write consolidated weights.")
    p.add_argument("source", help="run folder or iter_* folder")
    p.add_argument("--output", required=True, help="FILE.safetensors or FILE.pth")
    p.add_argument(
        "--ema-sigma-rel", type=float, help="relative length of the weight average; rebuilt from the stored ones"
    )
    p.add_argument("--raw", action="store_true", help="the weights themselves instead of an average")
    return p.parse_args(argv)


def averaged(source: checkpoint.Weights, chunks, sigma_rel: float) -> None:
    """Load the average of length `sigma_rel`, stored or rebuilt from every stored one of the run (post-hoc EMA)."""
    lengths = list(source.config.ema.sigma_rels)
    if sigma_rel in lengths:
        source.load(chunks, sigma_rel)
        return
    if not lengths:
        raise ValueError(f"{source.folder} stores no averages (ema.sigma_rels is empty); use --raw")
    folders = checkpoint.whole_checkpoints(source.folder.parent)
    last = checkpoint.read_state(source.folder)["steps_taken"]
    stored = [(checkpoint.read_state(f)["steps_taken"], s, f) for f in folders for s in lengths]
    stored = [(t, s, f) for t, s, f in stored if 0 < t <= last]
    weights = ema.combine_weights([(t, s) for t, s, _ in stored], (last, sigma_rel))
    total = [torch.zeros_like(p, dtype=torch.float64) for c in chunks for p in c.parameters()]
    for weight, (_, s, folder) in zip(weights, stored):
        checkpoint.load_weights(chunks, folder, s)
        torch._foreach_add_(total, [p.detach().double() for c in chunks for p in c.parameters()], alpha=float(weight))
    with torch.no_grad():
        for p, value in zip((p for c in chunks for p in c.parameters()), total):
            p.copy_(value)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    output = Path(args.output)
    if output.suffix not in (".safetensors", ".pth"):
        raise ValueError(f"--output must end in .safetensors or .pth; got {output}")
    source = checkpoint.find_weights(args.source)
    m = source.config.model
    m.tensor_model_parallel_size = m.pipeline_model_parallel_size = m.context_parallel_size = 1
    m.virtual_pipeline_model_parallel_size, m.sequence_parallel = None, False
    parallel.init()
    _, chunks = build_chunks(m, "fp32", seed=0)
    if args.raw:
        source.load(chunks, None)
    elif args.ema_sigma_rel:
        averaged(source, chunks, args.ema_sigma_rel)
    else:
        source.load(chunks, "auto")
    tensors = {k: v.contiguous() for k, v in checkpoint.gather_whole(chunks).items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(output.name + ".tmp")
    if output.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(tensors, temporary)
    else:
        torch.save(tensors, temporary)
    temporary.replace(output)
    for name in ("config.yaml", *checkpoint.ASSETS):
        if (source.folder / name).is_file() and (source.folder / name) != output.parent / name:
            shutil.copyfile(source.folder / name, output.parent / name)
    settings = OmegaConf.to_container(OmegaConf.structured(source.config.model))
    write_atomically(output.with_name("config.json"), json.dumps({"model": settings}, indent=1).encode())
    count = sum(t.numel() for t in tensors.values())
    print(f"[INFO] wrote {output}: {len(tensors)} tensors, {count / 1e6:.2f} M parameters")
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(main))
