"""`dfm export`: consolidated weights from a run or checkpoint, in one process whatever layout they were trained in.

The one file, `model.safetensors` or `model.pth`, is all that generation needs (`checkpoints.exported`). Low-rank
updates are added to their weights, or left apart in `model.lora.safetensors` beside the base: generation reads either.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import plugins
from dfm_nb.base.argv import ArgumentParser, guard, quietly
from dfm_nb.checkpoints import exported, saving
from dfm_nb.checkpoints import weights as checkpoint
from dfm_nb.data.prepared_folder import TOKENIZER
from dfm_nb.model import ema
from dfm_nb.model.build import build_chunks
from dfm_nb.model.linear import is_lora, merged

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_ERROR = 0.1
"""Largest relative error of the profile of a rebuilt average."""


def parser() -> ArgumentParser:
    p = ArgumentParser(prog="dfm export", description="Write consolidated weights.")
    p.add_argument("source", help="run folder, iter_* folder, exported file or packaged model")
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
    p.add_argument(
        "--tokenizer-path", help="carry this tokenizer's decoder instead; its encoder must be the checkpoint's"
    )
    p.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the stored weights; bf16 takes half the room")
    return p


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
    profiles = [(t, length) for t, length, _ in stored]
    weights, error = ema.combine_weights(profiles, (last, sigma_rel))
    if not error <= MAX_ERROR:
        good = [f"{low:.3f} to {high:.3f}" for low, high in ema.rebuildable(profiles, last, MAX_ERROR)]
        raise ValueError(
            f"--ema-sigma-rel must lie in what the {len(profiles)} averages stored in this run can rebuild, "
            f"{' or '.join(good)}; got {sigma_rel:g}; keep more checkpoints, or that length in ema.sigma_rels"
        )
    print(f"[INFO] EMA of length {sigma_rel:g} from {len(profiles)} stored ones: its profile is off by {error:.1%}")
    lora = bool(source.config.model.lora.rank)  # then the averages are of the low-rank updates alone
    trained = [p for c in chunks for name, p in c.named_parameters() if is_lora(name) == lora]
    total = [torch.zeros_like(p, dtype=torch.float64) for p in trained]
    for weight, (_, length, folder) in zip(weights, stored):
        checkpoint.load_weights(chunks, folder, length, lora)
        torch._foreach_add_(total, [p.detach().double() for p in trained], alpha=float(weight))
    with torch.no_grad():
        for p, value in zip(trained, total):
            p.copy_(value)


def write_weights(
    tensors: dict[str, torch.Tensor],
    output: Path,
    resolved: cfg.Resolved,
    lora: str,
    assets: dict,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write `output`, with low-rank updates merged into it or (lora="apart") in a file beside it.

    tensors : floating point; they are stored as `dtype`, rounded after updates were merged.
    resolved : the settings, whose model is changed to describe the result. assets : small files of the checkpoint.
    """

    def write(file: Path, weights: dict[str, torch.Tensor], files: dict) -> None:
        exported.write(file, {n: t.to(dtype) for n, t in weights.items()}, files)

    model = resolved.config.model
    if model.lora.rank and lora == "apart":
        write(checkpoint.lora_file(output), {n: t for n, t in tensors.items() if is_lora(n)}, {})
        tensors = {n: t for n, t in tensors.items() if not is_lora(n)}
    elif model.lora.rank:
        tensors = merged(tensors, (model.lora.alpha or model.lora.rank) / model.lora.rank)
        model.lora.rank = model.lora.alpha = None
    write(output, tensors, assets | {"config.yaml": cfg.to_yaml(resolved).encode()})


def assets_of(folder: Path) -> dict[str, bytes]:
    """The small files of a checkpoint; of the manifest what generation reads, and no list of shards."""
    assets = checkpoint.read_assets(folder)
    if "manifest.json" in assets:
        manifest = checkpoint.read_manifest(folder)
        kept = {k: manifest[k] for k in ("tokenizer", "text_encoder", "latent_mean", "latent_std")}
        assets["manifest.json"] = json.dumps(kept).encode()
    return assets


def with_decoder(assets: dict[str, bytes], path: str) -> dict[str, bytes]:
    """The small files with another tokenizer of the same latents: a better decoder needs no other weights."""
    manifest = json.loads(assets["manifest.json"])
    name = manifest["tokenizer"]["name"]
    plugin = plugins.load("tokenizers", name)
    if not hasattr(plugin, "same_latents"):
        raise ValueError(f"--tokenizer-path is for tokenizers that travel with a checkpoint; this one has {name}")
    other = plugin.build(path)
    if not plugin.same_latents(other, plugin.build(exported.unpacked(assets))):
        raise ValueError(
            f"{path} must have the encoder that the checkpoint was trained with, and has another; leave out "
            "--tokenizer-path"
        )
    with tempfile.TemporaryDirectory() as folder:
        other.save(Path(folder, TOKENIZER))
        content = Path(folder, TOKENIZER).read_bytes()
    manifest["tokenizer"] |= other.identity()
    return assets | {TOKENIZER: content, "manifest.json": json.dumps(manifest).encode()}


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    output = Path(args.output)
    if output.suffix not in (".safetensors", ".pth"):
        raise ValueError(f"--output must end in .safetensors or .pth; got {output}")
    source = checkpoint.find_weights(args.source)
    provenance = cfg.from_yaml(source.folder / "config.yaml").provenance
    model = source.config.model
    model.tensor_model_parallel_size = model.pipeline_model_parallel_size = model.context_parallel_size = 1
    model.virtual_pipeline_model_parallel_size, model.sequence_parallel = None, False
    # folders of the machine that trained it mean nothing elsewhere
    source.config.dataset.path, source.config.checkpoint = None, type(source.config.checkpoint)()
    parallel.init()
    _, chunks = build_chunks(model, "fp32", seed=0)
    if args.raw:
        source.load(chunks, None)
    elif args.ema_sigma_rel is not None:
        averaged(source, chunks, args.ema_sigma_rel)
    else:
        source.load(chunks, "auto")
    tensors = {name: t.contiguous() for name, t in checkpoint.gather_whole(chunks).items()}
    output.parent.mkdir(parents=True, exist_ok=True)
    resolved = cfg.Resolved(source.config, provenance)
    assets = assets_of(source.folder)
    if args.tokenizer_path:
        assets = with_decoder(assets, args.tokenizer_path)
    write_weights(tensors, output, resolved, args.lora, assets, DTYPES[args.dtype])
    parallel.shutdown()
    return 0


@quietly()
def export_weights(source: str | os.PathLike, output: str | os.PathLike, **flags: Any) -> Path:
    """Consolidated weights of a run or checkpoint in one file, whose path is returned.

    Parameters
    ----------
    output : FILE.safetensors or FILE.pth. **flags : the other flags of `dfm export` with underscores.

    >>> export_weights("runs/pretrain", "model.safetensors")  # doctest: +SKIP
    """
    words = parser().words({"source": source, "output": output, **flags})
    parser().read(words)
    main(words)
    return Path(output)


if __name__ == "__main__":
    raise SystemExit(guard(main))
