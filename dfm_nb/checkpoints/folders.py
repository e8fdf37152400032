"""Checkpoint folders: found and verified, and the data set's small files in them.

    iter_0001000/  rank-00000.safetensors, ...   tensors, in pieces
                   index.json      what whole tensors the pieces make (checkpoints.tensor_files)
                   state.json      iteration, position in the data, consumed samples and tokens, schedule
                   config.yaml     the resolved configuration
                   manifest.json, tokenizer.safetensors, text_empty.safetensors   copies of the data set's
                   latent_statistics.json, training_samples.json   what training normalised by; sizes, rates, captions
                   checksums.json  sha256 and size of each of the above, and of itself

A folder gets this name when all of it is on disk, and `latest_checkpointed_iteration.txt` changes only then. A file
that does not match its checksum is refused; the error names it. Loading runs no code from a file.
"""

import contextlib
import json
import os
from pathlib import Path

from dfm_nb import config as cfg
from dfm_nb.base import pretrained
from dfm_nb.base.files import CHECKSUMS, Json, check, read_json, read_listing
from dfm_nb.base.log import log
from dfm_nb.base.run import iteration_folders, written_path
from dfm_nb.checkpoints.tensor_files import INDEX, CheckpointError, TensorIndex
from dfm_nb.config import samples
from dfm_nb.data.prepared_folder import Encoded, Statistics
from dfm_nb.data.shards import Form
from dfm_nb.packs.packs import LatentStatistics

TRACKER = "latest_checkpointed_iteration.txt"
NEEDED = (INDEX, "state.json", "config.yaml")
"""Files that every checkpoint has, in addition to those of its tensors."""

MANIFEST, STATISTICS = "manifest.json", "latent_statistics.json"
ENCODERS = ("tokenizer", "text_encoder")
ASSETS = (MANIFEST, "tokenizer.safetensors", "text_empty.safetensors", STATISTICS, samples.FILE)
"""What a checkpoint carries of the data, so that generation needs nothing else."""


def iteration_of(folder: Path) -> int:
    """1000 of `iter_0001000`."""
    return int(folder.name.removeprefix("iter_"))


def whole_checkpoints(root: Path) -> list[Path]:
    """Finished checkpoint folders, oldest first. A folder without a checksum file is not finished."""
    return [p for _, p in iteration_folders(root) if (p / CHECKSUMS).is_file()]


def read_object(path: Path, form: type[Form] = Form) -> Json:
    """The JSON object in a file; `CheckpointError` names the file and what is not of the form."""
    value = read_json(path)
    if not value:
        raise CheckpointError(f"{path} must be a JSON object; it is missing or damaged: use another copy")
    fault = form.fault(value)
    if fault:
        raise CheckpointError(f"{path} is damaged ({fault}); use another checkpoint")
    return value


def verify(folder: Path) -> None:
    """Raise `CheckpointError` when a file is missing, changed, not listed, or holds more than tensors."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        raise CheckpointError(f"{folder} is incomplete: it has no {CHECKSUMS}, so writing it was interrupted")
    try:
        files = read_listing(listing)
        check(folder, files, files, "use another checkpoint")
        assets = [name for name in ASSETS if (folder / name).is_file()]
        unlisted = {*NEEDED, *TensorIndex(folder).files(), *assets} - files.keys()
        if unlisted:
            raise ValueError(f"{listing} is damaged: it does not list {', '.join(sorted(unlisted))}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be used: {error}") from None
    read_state(folder)


def read_state(folder: Path) -> Json:
    """The `state` that `saving.Writer.save` wrote: iteration, steps taken, position in the data."""
    return read_object(folder / "state.json")


def find(path: str | Path) -> Path:
    """The checkpoint for a user's path: the `iter_*` folder itself, or the newest good one of a folder or a run.

    It has passed `verify`. Damaged checkpoints are reported and the previous one is used.

    Raises
    ------
    FileNotFoundError : nothing finished is there. CheckpointError : the named `iter_*` folder, or all, are damaged.
    """
    path = written_path(path)
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob("iter_*"))
        hint = f"; there is {', '.join(near[-3:])}" if near else ""
        if len(path.parts) == 1:
            hint += f", and no packaged model of that name; packaged: {', '.join(pretrained.files()) or 'none'}"
        raise FileNotFoundError(f"there is no checkpoint at {path}{hint}")
    # also if the path is "."; then no other checkpoint may replace it
    if path.resolve().name.startswith("iter_"):
        verify(path)
        return path
    whole = checkpoints_of(path)
    newest = usable(whole[0].parent) if whole else None
    if newest is None:
        raise FileNotFoundError(
            f"{path} holds no finished checkpoint (no iter_*/ with {CHECKSUMS}); train first, or give another folder; "
            "convert weights of other tools with `dfm import`"
        )
    return newest


def checkpoints_of(path: Path) -> list[Path]:
    """Finished checkpoints of a run, or of a folder of them, oldest first; not verified."""
    roots = [path, path / "checkpoints"]
    # it may be damaged: each checkpoint has its own, too
    with contextlib.suppress(ValueError, FileNotFoundError):
        named = cfg.from_yaml(path / "config.yaml").config.checkpoint.checkpoint_dir
        if named:
            roots.insert(0, Path(named))
    return next(filter(None, map(whole_checkpoints, roots)), [])


def usable(root: Path) -> Path | None:
    """The newest checkpoint under `root` that passes `verify`; those that do not are reported.

    None if nothing was saved yet; `CheckpointError` if there are checkpoints and all are damaged.
    """
    for folder in sorted(root.glob("iter_*.tmp")):
        log.warning("%s is incomplete and is not used", folder.name)
    faults = []
    for _, folder in reversed(iteration_folders(root)):
        try:
            verify(folder)
            return folder
        except CheckpointError as error:
            faults.append(error)
            log.warning("%s; trying the previous checkpoint", error)
    if faults:
        what = f"none of the {len(faults)} checkpoints under {root} can be used ({faults[0]})"
        raise CheckpointError(f"{what}; use another folder, or remove them all to start from scratch")
    return None


def read_assets(root: Path) -> dict[str, bytes]:
    """The `ASSETS` of a data set or checkpoint: name -> content; ValueError if its listing lacks one."""
    names = [name for name in ASSETS if os.path.lexists(root / name)]
    check(root, read_listing(root / CHECKSUMS), names, "restore it, or remove it if the folder did not come with it")
    return {name: (root / name).read_bytes() for name in names}


def read_manifest(folder: Path) -> Json:
    """`manifest.json` of a data set or checkpoint; FileNotFoundError if there is none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            "the weights come without manifest.json, so their tokenizer and text encoder are unknown; take some that "
            "were trained on a data set, not with dataset.mock"
        )
    return read_object(path, Encoded)


def source_of(manifest: Json) -> Json:
    """What a manifest says of the source that its data come from."""
    source = manifest.get("source")
    return source if isinstance(source, dict) else {}


def statistics_file(statistics: LatentStatistics) -> bytes:
    """The content of a checkpoint's `latent_statistics.json`: what training subtracted and divided by."""
    return json.dumps({"latent_mean": statistics.mean.tolist(), "latent_std": statistics.std.tolist()}).encode()


def read_config(folder: Path) -> cfg.Config:
    """The configuration of a checkpoint, with what its training samples have."""
    config = cfg.from_yaml(folder / "config.yaml").config
    path = folder / samples.FILE
    if not path.is_file():
        return config
    try:
        return config.with_samples(samples.TrainingSamples.model_validate_json(path.read_bytes()))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({' '.join(str(error).split())}); use another checkpoint") from None


def read_statistics(folder: Path) -> LatentStatistics:
    """The statistics that a checkpoint was trained with; imports and data sets have them in the manifest."""
    own = folder / STATISTICS
    manifest = read_object(own, Statistics) if own.is_file() else read_manifest(folder)
    return LatentStatistics.from_manifest(manifest)
