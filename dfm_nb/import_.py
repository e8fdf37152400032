"""`dfm import`: third-party weights as a file that `dfm generate` and `dfm pretrain` read.

It reads Wan 2.1 for text to video (a diffusers folder, its hub id, or LoRA adapters) and NeMo DFM's DiT (a
`model.pth` or folders of Megatron-Bridge). Only tensors and JSON are read. Unknown and missing keys are errors.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base.argv import quietly
from dfm_nb.base.options import Options, option
from dfm_nb.base.pretrained import EXPORTED
from dfm_nb.checkpoints import exported, loading, nemo_dfm, wan_folder
from dfm_nb.checkpoints.consolidated import whole_weights, write_weights
from dfm_nb.config.notation import Overrides

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # ./DIR and ../DIR are paths
WANTED = ("transformer/*", "scheduler/*", "vae/config.json", "model_index.json")
"""Files of a hub repository that are read."""


class ImportOptions(Options):
    """Import weights of Wan 2.1 or NeMo DFM's DiT."""

    prog = "dfm import"
    source: str = option(
        help="Wan 2.1: diffusers' folder, its hub id, or a .safetensors of LoRA adapters; NeMo DFM: model.pth, an "
        "iter_* folder (torch_dist), or the folder around those",
        positional=True,
    )
    output: str = option(help="folder for model.safetensors, or FILE.safetensors or FILE.pth", output=True)
    base: str | None = option(None, "the imported weights that LoRA adapters belong to")
    tokenizer: str | None = option(None, "tokenizer of the data it was trained on: wan_vae, and NeMo DFM cosmos_cv")
    text_encoder: str | None = option(None, "text encoder of the data it was trained on: umt5, and NeMo DFM t5")
    settings: Overrides = option([], "that differ from the published model's", positional=True, metavar="KEY=VALUE")


def located(source: str) -> Path:
    """The path itself, or the local copy of the hub's files of that id, fetched if needed."""
    path = Path(source)
    if path.name == "transformer" and wan_folder.is_wan(path.parent):
        return path.parent
    if path.exists() or not HUB_ID.fullmatch(source):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(WANTED)))
    except Exception as error:
        raise FileNotFoundError(
            f"there is no folder {source}, and the hub's model of that id cannot be fetched ({type(error).__name__}); "
            f"run `hf download {source} --local-dir DIR` on a machine with internet access, then pass DIR"
        ) from None


def with_adapters(source: Path, base: str, output: Path) -> None:
    """Write the weights of `base` and, next to them, the LoRA adapters of `source`."""
    found = loading.find_weights(base)
    model = found.config.model
    if model.variant != "wan" or model.lora.rank:
        raise ValueError(f"--base {base} must be a Wan without LoRA adapters; import or export one first")
    parallel.init()
    rank, adapters = wan_folder.updates_in(source, model)
    weights = whole_weights(found)
    both = exported.Lazy([*weights, *adapters], lambda name: adapters[name] if name in adapters else weights[name])
    model.lora.rank, model.lora.alpha = rank, float(rank)
    write_weights(both, output, found, "apart")
    parallel.shutdown()


@quietly()
def import_weights(source: str | os.PathLike, output: str | os.PathLike, **flags: Any) -> Path:
    """Third-party weights in one file; returns `output`, which `Pipeline` and `checkpoint.pretrained` accept.

    Parameters
    ----------
    source : a folder or hub id of Wan 2.1 as diffusers keeps it, a file of LoRA adapters (with `base`), or weights of
        NeMo DFM. output : a folder, FILE.safetensors or FILE.pth. **flags : those of `dfm import` with underscores.

    >>> import_weights("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "wan-imported")  # doctest: +SKIP
    """
    asked = ImportOptions(source=os.fspath(source), output=os.fspath(output), **flags)
    read, file = located(asked.source), Path(asked.output)
    if file.suffix not in (".safetensors", ".pth"):
        file = file / EXPORTED
    for given in (read, Path(asked.base or read)):
        if file.exists() and file.resolve().is_relative_to(given.resolve()):
            raise ValueError(f"--output {file} would replace a file of {given}, which is read; choose another folder")
    file.parent.mkdir(parents=True, exist_ok=True)
    if asked.base is not None:
        with_adapters(read, asked.base, file)
        return Path(output)
    if read.suffix == ".safetensors":
        raise ValueError(f"{read} must be LoRA adapters, which need --base, the imported weights that they are of")
    if wan := wan_folder.is_wan(read):
        settings, manifest = wan_folder.settings_of(read), wan_folder.manifest_of(read)
    else:
        weights = nemo_dfm.read_source(read)
        settings, manifest = nemo_dfm.settings_of(weights), nemo_dfm.manifest_of()
    named = {"tokenizer": asked.tokenizer, "text_encoder": asked.text_encoder}
    manifest |= {kind: {"name": name} for kind, name in named.items() if name}
    resolved = cfg.resolve(None, overrides=[*settings, "mixed_precision=bf16", *asked.settings])
    model = resolved.config.model
    parallel.init()
    tensors = wan_folder.read_weights(read, model) if wan else nemo_dfm.read_weights(weights, model, read)
    parallel.shutdown()
    files = {"manifest.json": json.dumps(manifest).encode(), "config.yaml": cfg.to_yaml(resolved).encode()}
    exported.write(file, tensors, files)
    return Path(output)


def result(argv: list[str]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"output": ImportOptions.parse(argv).output}


def main(argv: list[str] | None = None) -> int:
    import_weights(**dict(ImportOptions.parse(argv)))
    return 0
