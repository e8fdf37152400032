"""Whole weights by name, one in memory at a time: read from a checkpoint of any layout, and written as one file."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dfm_nb import config as cfg
from dfm_nb.checkpoints import exported, folders, loading, saving
from dfm_nb.checkpoints.tensor_files import Lazy
from dfm_nb.model import ema
from dfm_nb.model.linear import is_lora, merged

MAX_ERROR = 0.1
"""Largest relative error of the profile of a rebuilt average."""


def whole_weights(source: loading.Weights, sigma_rel: float | str | None = "auto") -> Mapping[str, Tensor]:
    """All weights; LoRA weights have their own names.

    sigma_rel : as for `Weights.whole`, or any length that the run's stored averages can rebuild.
    """
    length = source.length(sigma_rel)
    if source.file is not None or length is None or length in source.config.ema.sigma_rels:
        return source.whole(sigma_rel)
    return _rebuilt(source, length)


def _rebuilt(source: loading.Weights, sigma_rel: float) -> Mapping[str, Tensor]:
    """The average of length `sigma_rel` from all stored ones of the run (post-hoc EMA).

    Karras et al. 2024 (EDM2), Sec. 3: any average is nearly a linear combination of stored ones.
    """
    lengths = list(source.config.ema.sigma_rels)
    if not lengths:
        raise ValueError(f"{source.folder} stores no averages (ema.sigma_rels is empty); use --raw")
    saved = folders.whole_checkpoints(source.folder.parent)
    for folder in saved:
        if folder != source.folder:  # this one was verified before
            folders.verify(folder)
    steps = {f: saving.read_state(f)["steps_taken"] for f in saved}
    last = steps[source.folder]
    found = [(t, length, folder) for folder, t in steps.items() for length in lengths if 0 < t <= last]
    profiles = [(t, length) for t, length, _ in found]
    weights, error = ema.combine_weights(profiles, (last, sigma_rel))
    if not error <= MAX_ERROR:
        good = [f"{low:.3f} to {high:.3f}" for low, high in ema.rebuildable(profiles, last, MAX_ERROR)]
        raise ValueError(
            f"--ema-sigma-rel must be a length that the {len(profiles)} stored averages of this run can rebuild, "
            f"{' or '.join(good)}; got {sigma_rel:g}; keep more checkpoints or set ema.sigma_rels"
        )
    print(f"[INFO] EMA of length {sigma_rel:g} from {len(profiles)} stored ones: its profile is off by {error:.1%}")
    lora = bool(source.config.model.lora.rank)
    averages = [loading.stored(folder, length, lora) for _, length, folder in found]

    def combined(name: str) -> Tensor:
        if is_lora(name) != lora:  # frozen, so it has no average
            return averages[0][name]
        # float64, as the weights of a combination can be large and of both signs
        total = sum(float(w) * s[name].double() for w, s in zip(weights, averages))
        return torch.as_tensor(total, dtype=torch.float32)

    return Lazy(averages[0], combined)


def write_weights(
    tensors: Mapping[str, Tensor], output: Path, source: loading.Weights, dtype: torch.dtype | None = None
) -> None:
    """Write `output`, and LoRA weights to a second file.

    tensors : floating point; stored as `dtype` (None: unchanged). source : has the small files and the settings.
    """
    assets = assets_of(source.folder)
    if source.config.model.lora.rank:
        updates = Lazy(filter(is_lora, tensors), tensors.__getitem__)
        exported.write(loading.lora_file(output), exported.as_dtype(updates, dtype), {})
        tensors = Lazy((n for n in tensors if not is_lora(n)), tensors.__getitem__)
    resolved = cfg.Resolved(source.config, cfg.from_yaml(source.folder / "config.yaml").provenance)
    exported.write(output, exported.as_dtype(tensors, dtype), assets | {"config.yaml": cfg.to_yaml(resolved).encode()})


def without_updates(tensors: Mapping[str, Tensor], model: cfg.ModelConfig) -> Mapping[str, Tensor]:
    """The weights with LoRA weights added; `model` is changed to have none."""
    if not model.lora.rank:
        return tensors
    whole, scale = tensors, model.lora.scale
    model.lora.rank = model.lora.alpha = None
    return Lazy((n for n in whole if not is_lora(n)), lambda name: merged(whole, name, scale))


def assets_of(folder: Path) -> dict[str, bytes]:
    """The small files of a checkpoint; the manifest has only the keys that generation reads."""
    assets = folders.read_assets(folder)
    if "manifest.json" in assets:
        manifest = folders.read_manifest(folder)
        kept = {k: manifest[k] for k in ("tokenizer", "text_encoder", "latent_mean", "latent_std")}
        assets["manifest.json"] = json.dumps(kept).encode()
    return assets
