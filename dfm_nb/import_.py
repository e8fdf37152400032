"""`dfm import`: third-party weights as a file that `dfm generate` and `dfm pretrain` read.

A network says what it imports (`config.networks`). Only tensors and JSON are read. Unknown and missing keys are errors.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.base import argv, plugins, pretrained
from dfm_nb.base.files import check_free
from dfm_nb.base.options import option
from dfm_nb.base.verb import FileVerb
from dfm_nb.checkpoints import folders, loading
from dfm_nb.checkpoints.consolidated import Foreign, write, write_weights
from dfm_nb.checkpoints.tensor_files import Lazy
from dfm_nb.config import networks
from dfm_nb.config.notation import Overrides

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # ./DIR and ../DIR are paths


class ImportOptions(FileVerb):
    """Import weights of other tools."""

    prog = "dfm import"
    source: str = option(
        help="Wan 2.1: diffusers' folder, its hub id, or a .safetensors of LoRA adapters; NeMo DFM: model.pth, an "
        "iter_* folder (torch_dist), or the folder around those",
        positional=True,
    )
    output: str = option(help="folder for model.safetensors, or FILE.safetensors or FILE.pth", output=True)
    base: str | None = option(None, "the imported weights that LoRA adapters belong to")
    tokenizer: str | None = option(None, "tokenizer of the data it was trained on; default: the published one")
    text_encoder: str | None = option(None, "text encoder of the data it was trained on; default: the published one")
    settings: Overrides = option([], "that differ from the published model's", positional=True, metavar="KEY=VALUE")

    @argv.quietly()
    def run(self) -> Path:
        read = located(self.source)
        file = Path(self.output)
        if file.suffix not in (".safetensors", ".pth"):
            file = file / pretrained.EXPORTED
        written = [file, loading.lora_file(file)] if self.base else [file]
        for path in written:
            check_free(path, self.overwrite)
        file.parent.mkdir(parents=True, exist_ok=True)
        if self.base is not None:
            with_adapters(read, self.base, file)
            return Path(self.output)
        if read.suffix == ".safetensors":
            raise ValueError(f"{read} must be LoRA adapters, which need --base, the imported weights that they are of")
        foreign = recognised(read)
        manifest = dict(foreign.manifest)
        for kind in folders.ENCODERS:
            name = getattr(self, kind)
            if name:
                manifest[kind] = {"name": name}
        resolved = cfg.resolve(None, overrides=[*foreign.settings, "mixed_precision=bf16", *self.settings])
        parallel.init()
        tensors = foreign.tensors(resolved.config.model)
        parallel.shutdown()
        files = {"manifest.json": json.dumps(manifest).encode(), "config.yaml": cfg.to_yaml(resolved).encode()}
        write(file, tensors, files)
        return Path(self.output)


main = ImportOptions.main


def located(source: str) -> Path:
    """The path itself, or the local copy of the hub's files of that id, fetched if needed."""
    path = Path(source)
    if path.is_file() or path.is_dir():
        return path
    wanted: list[str] = []
    for name in networks.names():
        wanted += networks.find(name).hub_files
    if path.exists() or not wanted or not HUB_ID.fullmatch(source):
        raise FileNotFoundError(f"{path} must be a file or a folder; there is none, or a pipe or a device")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=wanted))
    except Exception as error:
        raise FileNotFoundError(
            f"there is no folder {source}, and the hub's model of that id cannot be fetched ({type(error).__name__}); "
            f"run `hf download {source} --local-dir DIR` on a machine with internet access, then pass DIR"
        ) from None


def recognised(path: Path) -> Foreign:
    """The weights there, by the first network that recognises them."""
    known = []
    for name in networks.names():
        importer = networks.find(name).importer
        if importer:
            foreign = plugins.code(importer)(path)
            if foreign is not None:
                return foreign
            known.append(name)
    raise ValueError(
        f"{path} holds no weights of a network that can be imported ({', '.join(known) or 'none'}); "
        "install what adds it"
    )


def with_adapters(source: Path, base: str, output: Path) -> None:
    """Write the weights of `base` and, next to them, the LoRA adapters of `source`."""
    source_of_base = loading.find_weights(base)
    model = source_of_base.config.model
    if not model.network.adapters or model.lora.rank:
        raise ValueError(
            f"--base {base} must be a network that adapters can be imported for, without any; it is {model.variant} "
            f"with model.lora.rank={model.lora.rank}; import or export the weights first"
        )
    parallel.init()
    rank, adapters = plugins.code(model.network.adapters)(source, model)
    weights = source_of_base.whole()
    both = Lazy([*weights, *adapters], lambda name: adapters[name] if name in adapters else weights[name])
    model.lora.rank = rank
    model.lora.alpha = float(rank)
    write_weights(both, output, source_of_base)
    parallel.shutdown()


def import_weights(source: str | os.PathLike, output: str | os.PathLike, **flags: Any) -> Path:
    """Third-party weights in one file; returns `output`, which `Pipeline` and `checkpoint.pretrained` accept.

    Parameters
    ----------
    source : a folder or hub id of Wan 2.1 as diffusers keeps it, a file of LoRA adapters (with `base`), or weights of
        NeMo DFM. output : a folder, FILE.safetensors or FILE.pth. **flags : those of `dfm import` with underscores.

    >>> import_weights("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "wan-imported")  # doctest: +SKIP
    """
    return ImportOptions(source=os.fspath(source), output=os.fspath(output), **flags).run()
