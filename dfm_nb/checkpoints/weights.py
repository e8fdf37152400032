"""Checkpoint folders: found, verified, and their weights loaded in any parallel layout.

    iter_0001000/  rank-00000.safetensors, ...   tensors, in pieces
                   index.json      what whole tensors the pieces make (checkpoints.tensor_files)
                   state.json      iteration, place in the data, consumed samples and tokens, schedule
                   config.yaml     the resolved configuration
                   checksums.json  sha256 and size of each of the above, and of itself

A folder is renamed to this when all of it is on disk, and `latest_checkpointed_iteration.txt` moves only then. What a
checksum contradicts is refused by name, and loading runs no code from a file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, eq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dfm_nb import config as cfg
from dfm_nb.base.files import check, read_json, read_listing, sha256
from dfm_nb.base.log import log
from dfm_nb.base.metrics import generated_with
from dfm_nb.base.pretrained import names, weights_path
from dfm_nb.base.run import iteration_folders, written_path
from dfm_nb.checkpoints import exported
from dfm_nb.checkpoints.state import EMA, OPTIMIZER
from dfm_nb.checkpoints.tensor_files import INDEX, CheckpointError, Lazy, TensorIndex
from dfm_nb.config import counts
from dfm_nb.config.schema import marked
from dfm_nb.data import prepared_folder
from dfm_nb.model.ema import PowerEMA
from dfm_nb.model.linear import is_lora
from dfm_nb.packs.packs import LatentStatistics
from dfm_nb.parallel.groups import global_name, own_part

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"
NEEDED = (INDEX, "state.json", "config.yaml")
"""Files that every checkpoint has, besides those of its tensors."""

MANIFEST, STATISTICS = "manifest.json", "latent_statistics.json"
ENCODERS = ("tokenizer", "text_encoder")
LORA = "model.lora."  # the settings of low-rank updates
ASSETS = (MANIFEST, "tokenizer.safetensors", "text_empty.safetensors", STATISTICS)
"""Files that a checkpoint carries along, so that generation needs nothing else: the data set's, and the statistics."""


def iteration_of(folder: Path) -> int:
    """1000 of `iter_0001000`."""
    return int(folder.name.removeprefix("iter_"))


def whole_checkpoints(root: str | Path) -> list[Path]:
    """Finished checkpoint folders, oldest first. A folder without a checksum file is not finished."""
    return [p for _, p in iteration_folders(Path(root)) if (p / CHECKSUMS).is_file()]


def read_object(path: Path, wanted: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file; `CheckpointError` names the file and what of `wanted` it lacks."""
    value = read_json(path)
    if value is None:
        raise CheckpointError(f"{path} must be a JSON object; it is missing or damaged: take another copy")
    if missing := prepared_folder.lacking(value, wanted or {}):
        raise CheckpointError(f"{path} is damaged ({', '.join(missing)}); use another checkpoint")
    return value


def verify(folder: Path) -> None:
    """Raise `CheckpointError` when a file is missing, changed, not listed, or holds more than tensors."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        raise CheckpointError(f"{folder} is not a whole checkpoint: it has no {CHECKSUMS} (its writing was cut off)")
    try:
        files = read_listing(listing)
        check(folder, files, files, "use another checkpoint")
        needed = {*NEEDED, *TensorIndex(folder).files()}
        if files.keys() & {*ASSETS} - {STATISTICS}:  # without any of its data set, the user may have put one there
            needed |= {name for name in ASSETS if (folder / name).is_file()}
        if lacking := sorted(needed - files.keys()):
            raise ValueError(f"{listing} is damaged: it does not list {', '.join(lacking)}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be used: {error}") from None
    read_object(folder / "state.json")


def find(path: str | Path) -> Path:
    """The checkpoint that a user's path means: an `iter_*` folder, or the newest good one of a folder or a run.

    What is returned has passed `verify`. A damaged newest one is logged, and the one before it is taken.

    Raises
    ------
    FileNotFoundError : nothing finished is there. CheckpointError : the named `iter_*` folder, or all, are damaged.
    """
    path = written_path(path)
    if not path.exists():
        near = [p.name for p in path.parent.glob("iter_*")] if path.parent.is_dir() else []
        hint = f"; there is {', '.join(sorted(near)[-3:])}" if near else ""
        if len(path.parts) == 1:
            hint += f", and no packaged model of that name; packaged: {', '.join(names()) or 'none'}"
        raise FileNotFoundError(f"there is no checkpoint at {path}{hint}")
    if path.resolve().name.startswith("iter_"):  # also when it is given as "."; then no other will do
        verify(path)
        return path
    if (whole := checkpoints_of(path)) and (newest := usable(whole[0].parent)):
        return newest
    raise FileNotFoundError(
        f"{path} holds no finished checkpoint (no iter_*/ with {CHECKSUMS}); train first, or name another folder; "
        "weights of others come in by dfm import"
    )


def checkpoints_of(path: Path) -> list[Path]:
    """Finished checkpoints of a run, or of a folder of them, oldest first; not verified."""
    roots = [path, path / "checkpoints"]
    with contextlib.suppress(ValueError, FileNotFoundError):  # each checkpoint has a configuration of its own
        if named := cfg.from_yaml(path / "config.yaml").config.checkpoint.checkpoint_dir:
            roots.insert(0, Path(named))
    return next(filter(None, map(whole_checkpoints, roots)), [])


def usable(root: Path) -> Path | None:
    """The newest checkpoint under `root` that passes `verify`; every one passed over is logged.

    None when there has been no save yet; `CheckpointError` when there are checkpoints and all are damaged.
    """
    for folder in sorted(root.glob("iter_*.tmp")):
        log.warning("%s was not finished and is not used", folder.name)
    folders, faults = [p for _, p in iteration_folders(root)], []
    for folder in reversed(folders):
        try:
            verify(folder)
            return folder
        except CheckpointError as error:
            faults.append(error)
            log.warning("%s; trying the one before it", error)
    if faults:
        what = f"none of the {len(faults)} checkpoints under {root} can be used ({faults[0]})"
        raise CheckpointError(f"{what}; use another folder, or remove them all to start from scratch")
    return None


def read_assets(dataset: str | Path) -> dict[str, bytes]:
    """Those of a data set, by name."""
    root = Path(dataset)
    return {name: (root / name).read_bytes() for name in ASSETS if (root / name).is_file()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """`manifest.json` of a data set or checkpoint; FileNotFoundError when it has none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no manifest.json, so its tokenizer and text encoder are unknown; for shards of another "
            "writer `dfm adopt DIR --tokenizer NAME --text-encoder NAME` makes one: copy it to a checkpoint without"
        )
    return read_object(path, {**prepared_folder.STATISTICS, **{kind: {"name": str} for kind in ENCODERS}})


def statistics_file(statistics: LatentStatistics) -> bytes:
    """The content of a checkpoint's `latent_statistics.json`: what training subtracted and divided by."""
    return json.dumps({"latent_mean": statistics.mean.tolist(), "latent_std": statistics.std.tolist()}).encode()


def read_statistics(folder: Path) -> LatentStatistics:
    """Those that a checkpoint was trained with; of an import or a data set, which have no such file, the manifest's."""
    own = folder / STATISTICS
    found = read_object(own, prepared_folder.STATISTICS) if own.is_file() else read_manifest(folder)
    return LatentStatistics.from_manifest(found)


@dataclass
class Weights:
    """Where weights come from: a sharded checkpoint folder, or an exported file and a folder of what it carries."""

    folder: Path
    config: cfg.Config
    file: Path | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)  # of the file, on disk until they are used

    @functools.cached_property
    def identity(self) -> dict:
        """Name and hash, for sidecars; an exported file is hashed once."""
        if self.file is not None:
            return {"file": self.file.name, "sha256": sha256(self.file)}
        return {"folder": self.folder.name, "sha256": sha256(self.folder / CHECKSUMS)}

    def length(self, ema: float | str | None) -> float | None:
        """The average that `ema` means: "auto" as a length, or None where none is stored."""
        return generated_with(self.config.ema.sigma_rels) if ema == "auto" else ema  # type: ignore[return-value]

    def whole(self, ema: float | str | None = "auto") -> Mapping[str, Tensor]:
        """All weights by name, with low-rank updates under their own names.

        ema : "auto" (shortest stored average), a stored length, or None (the weights themselves). An exported file has
        one set of weights, whatever `ema` is, and low-rank updates in a file next to it.
        """
        lora, lengths = bool(self.config.model.lora.rank), self.config.ema.sigma_rels
        if self.file is not None:
            return self.tensors | read_lora(self.file) if lora else self.tensors
        if (length := self.length(ema)) is not None and length not in lengths:
            raise ValueError(
                f"{self.folder} has no average of length {length}; stored: {', '.join(map(str, lengths)) or 'none'} "
                "(dfm export --ema-sigma-rel makes others)"
            )
        return stored(self.folder, length, lora)

    def load(self, chunks: Sequence[nn.Module], ema: float | str | None = "auto") -> None:
        """Into this rank's chunks, in any layout. ema : as for `whole`."""
        load_whole(chunks, self.file or self.folder, self.whole(ema), bool(self.config.model.lora.rank))


def stored(folder: Path, sigma_rel: float | None, lora: bool) -> Mapping[str, Tensor]:
    """Whole float32 weights of an `iter_*` folder, one in memory at a time.

    sigma_rel : length of the stored average, or None for the weights themselves. With low-rank updates (lora) the
    averages are of these alone.
    """
    index = TensorIndex(folder)

    def one(name: str) -> Tensor:
        averaged = sigma_rel is not None and is_lora(name) == lora
        return index.whole(f"{EMA}{sigma_rel:g}.{name}" if averaged else name).float()

    return Lazy((name for name in index.entries if not name.startswith((EMA, OPTIMIZER))), one)


def find_weights(path: str | os.PathLike | Weights) -> Weights:
    """A run folder, a folder of checkpoints, an `iter_*` folder, an exported `.safetensors` / `.pth` file, or the name
    of a packaged model where no run or file has it.

    What was found before is given back as it is: finding hashes every file, and a run may have saved again since.
    """
    if isinstance(path, Weights):
        return path
    path = weights_path(path)
    if path.suffix in (".safetensors", ".pth") and path.is_file():
        tensors, files = exported.read(path)
        if "config.yaml" not in files:
            raise ValueError(f"{path} holds no settings; name the file that dfm export wrote beside it")
        if MANIFEST not in files:  # of a run on shards without one: it may lie beside the file
            files = read_assets(path.parent) | files
        folder = Path(exported.unpacked(tuple(files.items())).name)
        config = cfg.from_yaml(folder / "config.yaml").config
        return _fitting(Weights(folder if (folder / MANIFEST).is_file() else path.parent, config, path, tensors))
    return _fitting(weights_in(find(path)))


def _fitting(source: Weights) -> Weights:
    """`source`, if its tensors have as many numbers as the network of its configuration, which may be anybody's.

    No memory is taken for that network before.
    """
    model, rank = source.config.model, source.config.model.lora.rank or 0
    if source.file:
        held = sum(t.numel() for t in (*source.tensors.values(), *(read_lora(source.file) if rank else {}).values()))
    else:
        entries = TensorIndex(source.folder).entries.items()
        held = sum(math.prod(e.shape) for name, e in entries if not name.startswith((EMA, OPTIMIZER)))
    known = None not in (model.in_channels, model.text_dim, model.ffn_hidden_size)
    means = counts.parameter_count(model) + counts.lora_parameter_count(model, rank) if known else 0
    if held != means:
        what = f"the network of its config.yaml has {means:,} parameters, and its tensors {held:,}"
        raise CheckpointError(f"{source.file or source.folder} is damaged: {what}; use another checkpoint")
    return source


def weights_in(folder: Path) -> Weights:
    """Weights of an `iter_*` folder that is known to be whole."""
    return Weights(folder, cfg.from_yaml(folder / "config.yaml").config)


def settings_of(path: str | os.PathLike) -> dict[str, Any]:
    """The settings of the network in the weights that a path means, and what they recommend, by dotted key.

    A run's newest checkpoint is not verified for them, which takes long if it is large: loading does that.
    """
    folder = weights_path(path)
    whole = checkpoints_of(folder)
    config = (weights_in(whole[-1]) if whole else find_weights(folder)).config
    lora = bool(config.model.lora.rank)
    return {k: attrgetter(k)(config) for k in marked("network") if lora or not k.startswith(LORA)}


def lora_file(file: Path) -> Path:
    """Where an export keeps low-rank updates apart from `file`: model.lora.safetensors beside model.safetensors."""
    return file.with_suffix(f".lora{file.suffix}")


def read_lora(file: Path) -> dict[str, Tensor]:
    """The low-rank updates beside an exported file; FileNotFoundError when they are not there."""
    apart = lora_file(file)
    if not apart.is_file():
        raise FileNotFoundError(
            f"{file} is the base of low-rank updates (model.lora.rank in its settings), which dfm export wrote to "
            f"{apart.name} beside it; copy that file there too"
        )
    return exported.read(apart)[0]


@torch.no_grad()
def load_whole(chunks: Sequence[nn.Module], source: Path, whole: Mapping[str, Tensor], lora: bool = False) -> None:
    """`whole`, the weights of a file or folder, into this rank's shards; with `lora`, low-rank updates too."""
    for chunk in chunks:
        for local, p in chunk.named_parameters():
            if is_lora(local) and not lora:
                continue
            name = global_name(local, chunk)
            if name not in whole:
                raise ValueError(f"{source} lacks the weight {name}: it is not of this model")
            value = own_part(whole[name], p)
            if value.shape != p.shape:
                raise ValueError(
                    f"{source}: weight {name} must have shape {list(p.shape)} here; it has {list(value.shape)}; "
                    "it is damaged, or beside the config.yaml of another model"
                )
            p.copy_(value)


def load_pretrained(trainer: Any, path: Path, dataset: Path | None = None) -> LatentStatistics | None:
    """Weights of a checkpoint or export into a new training: optimizer, averages and data start afresh.

    A model with low-rank updates starts from a source without (its updates then start at zero) or with the same ones.

    Returns
    -------
    What latents must be normalised by for these weights; None when they are of another tokenizer than the data.
    """
    source = find_weights(path)
    lora = bool(source.config.model.lora.rank)
    fix = "leave these settings out, and they are the checkpoint's (in_channels and text_dim are those of the data)"
    if lora:
        fix += "; dfm export --lora merged makes one set of weights of low-rank updates and their base"
    check_same_model(source, trainer.config, lora, fix)
    different = _different_encoders(source.folder, dataset)
    for kind in different:
        log.warning("%s was trained on data of another %s than these, and has to learn it anew", path, kind)
    source.load(trainer.chunks)
    trainer.optimizer.reload_model_params()  # its float32 copies, which the first step would write back
    trainer.ema = PowerEMA(trainer.chunks, trainer.ema.sigma_rels)
    return None if "tokenizer" in different else read_statistics(source.folder)


def _different_encoders(source: Path, dataset: Path | None) -> list[str]:
    """What weights and a data set are known to differ in, of tokenizer and text encoder."""
    if dataset is None or not all((Path(f) / MANIFEST).is_file() for f in (source, dataset)):
        return []
    pairs = [(kind, read_manifest(source)[kind], read_manifest(dataset)[kind]) for kind in ENCODERS]
    return [
        kind.replace("_", " ")
        for kind, theirs, ours in pairs
        if any(theirs.get(k) != ours.get(k) for k in ("name", "sha256") if k in theirs and k in ours)
    ]


def check_same_model(
    source: Weights, config: cfg.Config, lora: bool = True, fix: str = "use its settings or another --run-dir"
) -> None:
    """ValueError naming every setting that decides what weights mean, and in which `source` differs from `config`.

    lora : those of low-rank updates too.
    """
    keys = [*marked("shape"), *(k for k in cfg.FIELDS if lora and k.startswith(LORA))]
    pairs = [(k, attrgetter(k)(source.config), attrgetter(k)(config)) for k in keys]
    shown = [
        f"{k}={json.dumps(ours)} (checkpoint: {json.dumps(theirs)})" for k, theirs, ours in pairs if theirs != ours
    ]
    if shown:
        raise ValueError(f"{source.file or source.folder} holds another model: {', '.join(shown)}; {fix}")


def check_same_optimizer(source: Weights, config: cfg.Config) -> None:
    """ValueError when a checkpoint holds the state of another optimizer, or lacks an average that `config` asks for."""
    for key, fits in (("optimizer.optimizer", eq), ("ema.sigma_rels", lambda a, b: set(a) >= set(b))):
        theirs, ours = attrgetter(key)(source.config), attrgetter(key)(config)
        if not fits(theirs, ours):
            raise ValueError(
                f"{source.folder} holds the state of {key}={theirs}, not of {ours}; set it to that, or start from "
                f"scratch in another --run-dir with checkpoint.pretrained={source.folder}"
            )
