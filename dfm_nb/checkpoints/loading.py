"""Weights of a checkpoint folder or an exported file, loaded into any parallel layout.

`folders` finds and verifies the folder.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dfm_nb import config as cfg
from dfm_nb.base.files import Json, StrPath, sha256
from dfm_nb.base.log import log
from dfm_nb.base.metrics import generated_with
from dfm_nb.base.pretrained import weights_path
from dfm_nb.checkpoints import exported, folders
from dfm_nb.checkpoints.folders import checkpoints_of
from dfm_nb.checkpoints.tensor_files import EMA, OPTIMIZER, CheckpointError, Lazy, TensorIndex, Tensors
from dfm_nb.config import counts
from dfm_nb.config.schema import marked
from dfm_nb.data.prepared_folder import of_latents
from dfm_nb.data.shards import Form
from dfm_nb.model.ema import PowerEMA, combine_weights, rebuildable
from dfm_nb.model.linear import is_lora
from dfm_nb.packs.packs import LatentStatistics
from dfm_nb.parallel.groups import global_name, own_part, rank

LORA = "model.lora."  # prefix of the settings of LoRA weights
MAX_ERROR = 0.1
"""Largest relative error of the profile of a rebuilt average."""


class Base(Form):
    """The record of the weights that a run began with."""

    path: str
    sha256: str
    guidance: float


@dataclass
class Weights:
    """The source of weights: a sharded checkpoint folder, or an exported file with a folder of its small files."""

    folder: Path
    config: cfg.Config
    file: Path | None = None
    # of the file, on disk until used
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def identity(self) -> dict:
        """Name and hash, for sidecars; an exported file is hashed once."""
        if self.file is not None:
            return {"file": self.file.name, "sha256": sha256(self.file)}
        return {"folder": self.folder.name, "sha256": sha256(self.folder / folders.CHECKSUMS)}

    @functools.cached_property
    def record(self) -> dict:
        """By which a run that depends on these weights knows them again: `recorded`. JSON-able."""
        return {"path": str(self.file or self.folder), **self.identity, "guidance": self.config.generation.guidance}

    @functools.cached_property
    def base(self) -> dict | None:
        """The record of the weights that the checkpoint's run began with; an export has none."""
        record = None if self.file else folders.read_state(self.folder).get("base")
        if record is not None and Base.fault(record):
            raise CheckpointError(f"{self.folder}: state.json is damaged (base); use another checkpoint")
        return record

    def whole(self, ema: float | str | None = "auto") -> Tensors:
        """All weights by name; LoRA weights have their own names.

        ema : "auto" (shortest stored average), any length that the run's stored averages can rebuild, or None (the
        weights themselves). An exported file has one set of weights, which is "auto", and its LoRA weights are in a
        second file; ValueError for a choice among them.
        """
        lora = bool(self.config.model.lora.rank)
        if self.file is not None:
            if ema != "auto":
                fix = "leave out the average (or --raw), or name the run"
                raise ValueError(f"{self.file} has only the weights that dfm export chose; {fix}")
            return self.tensors | read_lora(self.file) if lora else self.tensors
        lengths = self.config.ema.sigma_rels
        length: Any = generated_with(lengths) if ema == "auto" else ema
        return stored(self.folder, length, lora) if length in (None, *lengths) else rebuilt(self, length)

    @torch.no_grad()
    def load(self, chunks: Sequence[nn.Module], ema: float | str | None = "auto") -> None:
        """Into this rank's chunks, in any layout. ema : as for `whole`."""
        whole = self.whole(ema)
        source = self.file or self.folder
        for chunk in chunks:
            for local, p in chunk.named_parameters():
                if is_lora(local) and not self.config.model.lora.rank:
                    continue
                name = global_name(local, chunk)
                if name not in whole:
                    raise ValueError(f"{source} lacks the weight {name}: it is of another model")
                value = own_part(whole[name], p)
                if value.shape != p.shape:
                    raise ValueError(
                        f"{source}: weight {name} must have shape {list(p.shape)} here; it has {list(value.shape)}; "
                        "it is damaged, or its config.yaml belongs to another model"
                    )
                p.copy_(value)


def stored(folder: Path, sigma_rel: float | None, lora: bool) -> Tensors:
    """Whole float32 weights of an `iter_*` folder, one in memory at a time.

    sigma_rel : length of the stored average, or None for the weights themselves. With LoRA, only the LoRA weights
    are averaged.
    """
    index = TensorIndex(folder)

    def one(name: str) -> Tensor:
        averaged = sigma_rel is not None and is_lora(name) == lora
        return index.whole(f"{EMA}{sigma_rel:g}.{name}" if averaged else name).float()

    return Lazy((name for name in index.entries if not name.startswith((EMA, OPTIMIZER))), one)


def rebuilt(source: Weights, sigma_rel: float) -> Tensors:
    """The average of length `sigma_rel` from all stored ones of the run (post-hoc EMA).

    Karras et al. 2024 (EDM2), Sec. 3: any average is nearly a linear combination of stored ones.
    """
    lengths = source.config.ema.sigma_rels
    if not lengths:
        raise ValueError(f"{source.folder} stores no averages (ema.sigma_rels is empty); take the raw weights")
    lora = bool(source.config.model.lora.rank)
    last = folders.read_state(source.folder)["steps_taken"]
    profiles: list[tuple[int, float]] = []
    averages = []
    for folder in folders.whole_checkpoints(source.folder.parent):
        if folder != source.folder:  # this one was verified before
            folders.verify(folder)
        steps = folders.read_state(folder)["steps_taken"]
        if 0 < steps <= last:
            profiles += [(steps, length) for length in lengths]
            averages += [stored(folder, length, lora) for length in lengths]
    weights, error = combine_weights(profiles, (last, sigma_rel))
    if not error <= MAX_ERROR:
        good = [f"{low:.3f} to {high:.3f}" for low, high in rebuildable(profiles, last, MAX_ERROR)]
        raise ValueError(
            f"an average must have a length that the {len(profiles)} stored ones of this run can rebuild, "
            f"{' or '.join(good)}; got {sigma_rel:g}; keep more checkpoints or set ema.sigma_rels"
        )
    if rank() == 0:
        print(f"[INFO] EMA of length {sigma_rel:g} from {len(averages)} stored ones: its profile is off by {error:.1%}")

    def combined(name: str) -> Tensor:
        if is_lora(name) != lora:  # frozen, so it has no average
            return averages[0][name]
        # float64, as the weights of a combination can be large and of both signs
        total = sum(float(w) * s[name].double() for w, s in zip(weights, averages))
        return torch.as_tensor(total, dtype=torch.float32)

    return Lazy(averages[0], combined)


def find_weights(path: StrPath | Weights) -> Weights:
    """A run folder, a folder of checkpoints, an `iter_*` folder, an exported `.safetensors` / `.pth` file, or the name
    of a packaged model where no run or file has it.

    A `Weights` is returned unchanged: finding it again would hash every file, and the run may have saved since.
    """
    if isinstance(path, Weights):
        return path
    path = weights_path(path)
    if path.suffix in (".safetensors", ".pth") and path.is_file():
        path = path.absolute()  # the caller may change the working directory before all is read
        tensors, files = exported.read(path)
        if "config.yaml" not in files:
            raise ValueError(f"{path} holds no settings; give the file of the base that dfm export wrote next to it")
        folder = Path(exported.unpacked(tuple(files.items())).name)
        return _fitting(Weights(folder, folders.read_config(folder), path, tensors))
    return _fitting(weights_in(folders.find(path).absolute()))


def place_of(record: Json, named: str | None) -> Path | None:
    """Where the weights of a `Weights.record` are: at their place or, if moved, at `named` or among its checkpoints.

    None if no place has their content, because they were removed or replaced.
    """
    places = [Path(record["path"])]
    if named:
        path = weights_path(named)
        places += [path, *checkpoints_of(path)]
    for place in places:
        content = place / folders.CHECKSUMS if place.is_dir() else place
        if content.is_file() and sha256(content) == record["sha256"]:
            return place
    return None


def recorded(record: Json, named: str | None) -> Weights:
    """The weights of a `Weights.record`, found by `place_of`; FileNotFoundError if they are gone."""
    place = place_of(record, named)
    if place is None:
        raise FileNotFoundError(
            f"the run began with the weights {record['path']} of sha256 {record['sha256'][:12]}, which must still be "
            f"there or at checkpoint.pretrained; got {named} without them; restore them, or start another --run-dir"
        )
    return find_weights(place)


def _fitting(source: Weights) -> Weights:
    """`source`, if its tensors have as many numbers as the network of its config.yaml; CheckpointError otherwise.

    A config.yaml is untrusted: this is checked before memory is allocated for its network.
    """
    model = source.config.model
    if source.file:
        given = sum(t.numel() for t in source.whole().values())
    else:
        entries = TensorIndex(source.folder).entries.items()
        given = sum(math.prod(e.shape) for name, e in entries if not name.startswith((EMA, OPTIMIZER)))
    expected = 0
    if None not in (model.in_channels, model.text_dim, model.ffn_hidden_size):
        expected = counts.parameter_count(model) + counts.lora_parameter_count(model, model.lora.rank or 0)
    if given != expected:
        what = f"the network of its config.yaml has {expected:,} parameters, and its tensors {given:,}"
        raise CheckpointError(f"{source.file or source.folder} is damaged: {what}; use another checkpoint")
    return source


def weights_in(folder: Path) -> Weights:
    """Weights of an `iter_*` folder that `folders.find` has verified."""
    return Weights(folder, folders.read_config(folder))


def settings_of(path: StrPath) -> cfg.Leaves:
    """The network's settings and recommended generation settings of the weights at a path, by dotted key.

    A run's newest checkpoint is not verified here, because that takes long if it is large: loading does it.
    """
    folder = weights_path(path)
    whole = checkpoints_of(folder)
    config = folders.read_config(whole[-1]) if whole else find_weights(folder).config
    lora = bool(config.model.lora.rank)
    return {k: attrgetter(k)(config) for k in marked("network") if lora or not k.startswith(LORA)}


def lora_file(file: Path) -> Path:
    """The file of LoRA weights exported apart from `file`: model.lora.safetensors for model.safetensors."""
    return file.with_suffix(f".lora{file.suffix}")


def read_lora(file: Path) -> dict[str, Tensor]:
    """The LoRA weights of an exported file; FileNotFoundError if their file is missing."""
    apart = lora_file(file)
    if not apart.is_file():
        raise FileNotFoundError(
            f"{file} is the base of LoRA weights (model.lora.rank in its settings), which dfm export wrote to "
            f"{apart.name} in the same folder; copy that file there too"
        )
    return exported.read(apart)[0]


def load_pretrained(trainer: Any, path: Path | Weights, dataset: Path | None = None) -> LatentStatistics | None:
    """Weights of a checkpoint or export into a new training: optimizer, averages and data order start from scratch.

    A LoRA model starts from a source without LoRA weights (then its own start at zero) or with the same ones.

    Returns
    -------
    The latent statistics of these weights; None if they were trained with another tokenizer than the data's.
    """
    source = find_weights(path)
    lora = bool(source.config.model.lora.rank)
    fix = "omit these settings to use the checkpoint's (in_channels and text_dim are those of the data)"
    if lora:
        fix += "; dfm export --lora merged adds LoRA weights to their base"
    check_same_model(source, trainer.config, lora, fix)
    different = different_encoders(source.folder, dataset)
    for kind in different:
        assert dataset is not None
        if trainer.config.model.student:
            raise ValueError(
                f"a student learns on data of its teacher's {kind}, and {dataset} has another: prepare it again"
            )
        key = kind.replace(" ", "_")
        theirs = folders.read_manifest(source.folder)[key]["name"]
        same_name = theirs == folders.read_manifest(dataset)[key]["name"]
        flag = f"--{kind.replace(' ', '-')}{f'-path {source.folder}' if same_name else f' {theirs}'}"
        log.warning(
            "%s was trained with another %s and must relearn it; dfm prepare %s avoids that",
            source.record["path"],
            kind,
            flag,
        )
    source.load(trainer.chunks)
    # else the first step would write its old float32 copies back
    trainer.optimizer.reload_model_params()
    trainer.ema = PowerEMA(trainer.chunks, trainer.ema.sigma_rels)
    return None if "tokenizer" in different else folders.read_statistics(source.folder)


def different_encoders(source: Path, dataset: Path | None) -> list[str]:
    """Which of tokenizer and text encoder are known to differ between weights and a data set."""
    if dataset is None or not all((folder / folders.MANIFEST).is_file() for folder in (source, dataset)):
        return []
    different = []
    for kind in folders.ENCODERS:
        theirs = of_latents(folders.read_manifest(source)[kind])
        ours = of_latents(folders.read_manifest(dataset)[kind])
        if any(theirs[key] != ours[key] for key in {"name", "sha256"} & theirs.keys() & ours.keys()):
            different.append(kind.replace("_", " "))
    return different


def check_same_model(
    source: Weights, config: cfg.Config, lora: bool = True, fix: str = "use its settings or another --run-dir"
) -> None:
    """ValueError with every setting of the network's shape in which `source` differs from `config`.

    lora : also compare the LoRA settings.
    """
    keys = marked("shape")
    if lora:
        keys += [key for key in cfg.FIELDS if key.startswith(LORA)]
    different = []
    for key in keys:
        theirs = attrgetter(key)(source.config)
        ours = attrgetter(key)(config)
        if theirs != ours:
            different.append(f"{key}={json.dumps(ours)} (checkpoint: {json.dumps(theirs)})")
    if different:
        raise ValueError(f"{source.file or source.folder} holds another model: {', '.join(different)}; {fix}")


def check_same_optimizer(source: Weights, config: cfg.Config) -> None:
    """ValueError if a checkpoint has another optimizer's state, or lacks an average that `config` requires."""
    for key in ("optimizer.optimizer", "ema.sigma_rels"):
        theirs = attrgetter(key)(source.config)
        ours = attrgetter(key)(config)
        fits = set(ours) <= set(theirs) if isinstance(ours, list) else ours == theirs
        if not fits:
            raise ValueError(
                f"{source.folder} holds the state of {key}={theirs}, not of {ours}; set it to that, or start from "
                f"scratch in another --run-dir with checkpoint.pretrained={source.folder}"
            )
