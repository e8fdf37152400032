"""Sharded checkpoints that are whole or absent, in any parallel layout, on megatron-core's dist_checkpointing (torch_dist).

Enters: model chunks, optimizer, scheduler, averages and a JSON-able state. Leaves: `iter_0001000/` folders.
Guarantees: a checkpoint is written beside its final name and renamed when everything, the checksums last, is on disk; only then does
`latest_checkpointed_iteration.txt` move; what a checksum contradicts is refused by name; loading runs no code from a file.
Cost: a blocking save writes all of the state; an asynchronous one returns when it is safe to train on (`background_save`).

    iter_0001000/  *.distcp .metadata common.pt metadata.json   megatron-core's
                   state.json      iteration, place in the data, consumed samples and tokens
                   config.yaml     the resolved configuration
                   checksums.json  sha256 and size of each of the above
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from dfm_nb import config as cfg
from dfm_nb.base.files import sha256
from dfm_nb.base.run import iteration_folders, iteration_name
from dfm_nb.checkpoints.state import _LAYOUT_FREE, _ema_state, _load_ema, _load_model, _model_state
from dfm_nb.model.ema import PowerEMA
from dfm_nb.model.linear import is_lora
from dfm_nb.parallel.groups import global_name, mpu, shard_dim

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names it and says why."""


def iteration_of(folder: Path) -> int:
    return int(folder.name.removeprefix("iter_"))


def whole_checkpoints(root: str | Path) -> list[Path]:
    """Finished checkpoint folders, oldest first. A folder without a checksum file is not finished."""
    return [p for _, p in iteration_folders(Path(root)) if (p / CHECKSUMS).is_file()]


def verify(folder: Path) -> None:
    """Raise `CheckpointError` when a file is missing, short or changed."""
    listing = folder / CHECKSUMS
    if not listing.is_file():
        raise CheckpointError(f"{folder} is not a whole checkpoint: it has no {CHECKSUMS} (its writing was cut off)")
    for name, expected in json.loads(listing.read_text()).items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} is damaged: {name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{folder} is damaged: {name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            )
        if sha256(path) != expected["sha256"]:
            raise CheckpointError(f"{folder} is damaged: the content of {name} does not match its checksum")
    refuse_code(folder)


class _NamesOnly(pickle.Unpickler):
    """Loads torch's checkpoint index, which is a pickle, knowing only the names such an index is made of."""

    ALLOWED = {
        "torch.distributed.checkpoint.metadata": {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "Path"},
    }

    def find_class(self, module, name):
        if name not in self.ALLOWED.get(module, ()):
            raise CheckpointError(f"the checkpoint's index names {module}.{name}, which no checkpoint needs: refused")
        return super().find_class(module, name)


def refuse_code(folder: Path) -> None:
    """The index of a torch_dist checkpoint is a pickle: read it once with an unpickler that knows no callables of interest."""
    data_files(folder)


def data_files(folder: Path) -> list[str]:
    """Names of the files that hold a checkpoint's tensors, from its index."""
    with (folder / ".metadata").open("rb") as f:
        index = _NamesOnly(f).load()
    return sorted({info.relative_path for info in index.storage_data.values()})


def find(path: str | Path) -> Path:
    """The checkpoint that a user's path means: an `iter_*` folder, a folder of them, or a run folder; newest whole one.

    Raises
    ------
    FileNotFoundError : nothing finished is there. CheckpointError : the named `iter_*` folder is damaged.
    """
    path = Path(path)
    if not path.exists():
        near = [p.name for p in path.parent.glob("iter_*")] if path.parent.is_dir() else []
        hint = f"; there is {', '.join(sorted(near)[-3:])}" if near else ""
        padded = path.parent / iteration_name(int(path.name[5:])) if path.name[5:].isdigit() else None
        if padded is not None and padded.exists():  # iter_5000 for iter_0005000
            return find(padded)
        raise FileNotFoundError(f"there is no checkpoint at {path}{hint}")
    if path.name.startswith("iter_"):
        verify(path)
        return path
    for root in (path, path / "checkpoints"):
        candidates = whole_checkpoints(root)
        if candidates:
            return candidates[-1]
    raise FileNotFoundError(
        f"{path} holds no finished checkpoint (no iter_*/ with {CHECKSUMS}); train first, or name another folder"
    )


def usable(root: Path, say) -> Path | None:
    """The newest checkpoint under `root` that passes `verify`; every one passed over is named through `say`.

    None when there has been no save yet; `CheckpointError` when there are checkpoints and all are damaged.
    """
    for folder in sorted(root.glob("iter_*.tmp")):
        say(f"{folder.name} was not finished and is not used")
    folders = [p for _, p in iteration_folders(root)]
    for folder in reversed(folders):
        try:
            verify(folder)
            return folder
        except CheckpointError as error:
            say(f"{error}; trying the one before it")
    if folders:
        raise CheckpointError(
            f"none of the {len(folders)} checkpoints under {root} can be used (each is named above); remove them to start anew"
        )
    return None


ASSETS = ("manifest.json", "tokenizer.safetensors", "text_empty.safetensors")
"""Files of a data set that a checkpoint carries along, so that generation needs nothing else of it."""


def read_assets(dataset: str | Path) -> dict[str, bytes]:
    root = Path(dataset)
    return {name: (root / name).read_bytes() for name in ASSETS if (root / name).is_file()}


def read_manifest(folder: Path) -> dict:
    path = folder / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no manifest.json, so the tokenizer and text encoder it was trained with are unknown; "
            "copy the one of its data set there"
        )
    return json.loads(path.read_text())


@dataclass
class Weights:
    """Where weights come from: a sharded checkpoint folder, or an exported file with its config.json beside it."""

    folder: Path
    config: cfg.Config
    file: Path | None = None

    def load(self, chunks, ema: float | str | None = "auto") -> None:
        """Into this rank's chunks, in any layout. ema : "auto" (shortest stored average), a stored length, or None (raw)."""
        if self.file is not None:
            load_exported(chunks, self.file, bool(self.config.model.lora.rank))
            return
        lengths = list(self.config.ema.sigma_rels)
        if ema == "auto":
            ema = min(lengths) if lengths else None
        if ema is not None and ema not in lengths:
            raise ValueError(
                f"{self.folder} has no average of length {ema}; stored: {', '.join(map(str, lengths)) or 'none'} "
                "(dfm export --ema-sigma-rel makes others)"
            )
        load_weights(chunks, self.folder, ema, bool(self.config.model.lora.rank))


def find_weights(path: str | Path) -> Weights:
    """A run folder, a folder of checkpoints, an `iter_*` folder, or an exported `.safetensors` / `.pth` file."""
    path = Path(path)
    if path.suffix in (".safetensors", ".pth") and path.is_file():
        beside = path.parent / "config.yaml"
        if not beside.is_file():
            raise FileNotFoundError(f"{path} needs the config.yaml that dfm export wrote beside it")
        return Weights(path.parent, cfg.from_yaml(beside).config, path)
    folder = find(path)
    refuse_code(folder)
    return weights_in(folder)


def weights_in(folder: Path) -> Weights:
    """Of an `iter_*` folder that is known to be whole."""
    return Weights(folder, cfg.from_yaml(folder / "config.yaml").config)


def identity(path: str | Path) -> dict:
    """Name and hash of the weights a path means: for sidecars."""
    source = find_weights(path)
    if source.file is not None:
        return {"file": source.file.name, "sha256": sha256(source.file)}
    return {"folder": source.folder.name, "sha256": sha256(source.folder / CHECKSUMS)}


def gather_whole(chunks, values: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU by global name, on rank 0 (others get {}), from every tp and pp rank of one replica.

    values : tensors by this rank's parameter name (for one chunk) instead of the parameters themselves.
    """
    local = []
    for chunk in chunks:
        for name, p in chunk.named_parameters():
            tensor = p if values is None else values[name]
            local.append((global_name(name, chunk), tensor.detach().cpu(), shard_dim(p)))
    if dist.get_world_size() == 1:
        return {name: tensor for name, tensor, _ in local}
    everyone: list = [None] * dist.get_world_size()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    dist.all_gather_object(everyone, (tp_rank, local))
    parts: dict[str, dict[int, tuple]] = {}
    for rank, tensors in everyone:
        for name, tensor, dim in tensors:
            parts.setdefault(name, {})[rank] = (tensor, dim)
    if dist.get_rank() != 0:
        return {}
    return {
        name: by_rank[0][0]
        if by_rank[0][1] is None
        else torch.cat([by_rank[r][0] for r in sorted(by_rank)], by_rank[0][1])
        for name, by_rank in parts.items()
    }


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def lora_file(file: Path) -> Path:
    """Where an export keeps low-rank updates apart from `file`: model.lora.safetensors beside model.safetensors."""
    return file.with_suffix(f".lora{file.suffix}")


@torch.no_grad()
def load_exported(chunks, file: Path, lora: bool = False) -> None:
    """Consolidated weights (global names) into this rank's shards; with `lora`, updates from the file beside it too."""
    whole = _read_tensors(file)
    if lora:
        apart = lora_file(file)
        if not apart.is_file():
            raise FileNotFoundError(
                f"{file} is the base of low-rank updates (model.lora.rank in its config.yaml), which dfm export wrote to "
                f"{apart.name} beside it; copy that file there too"
            )
        whole |= _read_tensors(apart)
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    for chunk in chunks:
        for local, p in chunk.named_parameters():
            if is_lora(local) and not lora:
                continue
            name, dim = global_name(local, chunk), shard_dim(p)
            if name not in whole:
                raise ValueError(f"{file} lacks the weight {name}: it is not an export of this model")
            value = whole[name] if dim is None else whole[name].chunk(size, dim)[rank]
            if value.shape != p.shape:
                raise ValueError(
                    f"{file}: weight {name} must have shape {list(p.shape)} here; it has {list(value.shape)}; "
                    "use the config.yaml that was exported with it"
                )
            p.copy_(value)


def load_pretrained(trainer, path: Path) -> None:
    """Weights of a checkpoint or export into a new training: optimizer, averages and data start afresh.

    A model with low-rank updates starts from a source without (its updates then start at zero) or with the same ones.
    """
    source = find_weights(path)
    check_same_model(source, trainer.config, keys=SHAPES)
    if source.config.model.lora.rank:
        check_same_model(
            source, trainer.config, keys=_LORA, fix="dfm export --lora merged makes one set of weights of it"
        )
    source.load(trainer.chunks)
    trainer.optimizer.reload_model_params()
    trainer.ema = PowerEMA(trainer.chunks, trainer.ema.sigma_rels)


SHAPES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "in_channels",
    "text_dim",
    "patch_spatial",
    "patch_temporal",
    "adaln_lora_dim",
    "pooled_text",
    "rope",
)
_LORA = ("lora.rank", "lora.alpha")
SHAPE_KEYS = (*SHAPES, *_LORA)
"""Settings of config.model that fix the shapes of the weights and how they are used, and the scale of low-rank updates."""


def check_same_model(
    source: Weights, config: cfg.Config, keys: Sequence[str] = SHAPE_KEYS, fix="use its settings or another --run-dir"
) -> None:
    """ValueError naming every setting of `keys` in which a checkpoint or export differs from `config`."""
    pairs = [(k, attrgetter(k)(source.config.model), attrgetter(k)(config.model)) for k in keys]
    shown = [
        f"model.{k}={json.dumps(ours)} (checkpoint: {json.dumps(theirs)})"
        for k, theirs, ours in pairs
        if theirs != ours
    ]
    if shown:
        raise ValueError(f"{source.file or source.folder} holds another model: {', '.join(shown)}; {fix}")


def check_same_optimizer(source: Weights, config: cfg.Config) -> None:
    """ValueError when a checkpoint holds the state of another optimizer than `config` asks for."""
    theirs, ours = source.config.optimizer.optimizer, config.optimizer.optimizer
    if theirs != ours:
        raise ValueError(
            f"{source.folder} holds the state of optimizer.optimizer={theirs}, not {ours}; set optimizer.optimizer={theirs}, or start anew "
            f"in another --run-dir from its weights with checkpoint.pretrained={source.folder}"
        )


def load_weights(chunks, folder: Path, sigma_rel: float | None = None, lora: bool = False) -> None:
    """Only the weights, in this layout: raw, or the average of length `sigma_rel`.

    lora : the checkpoint has low-rank updates (its averages are then of these alone); without, those of `chunks` are left.
    """
    refuse_code(folder)
    whole = _model_state(chunks, dict(_LAYOUT_FREE))
    model_state = {
        chunk_key: {k: v for k, v in state.items() if lora or not is_lora(k)} for chunk_key, state in whole.items()
    }
    if sigma_rel is None or lora:
        _load_model(chunks, dist_checkpointing.load(dict(model_state), str(folder)))
    if sigma_rel is not None:
        ema = PowerEMA(chunks, [sigma_rel], lambda name, _p: is_lora(name) == lora)
        state = dist_checkpointing.load({"ema": _ema_state(ema, model_state)}, str(folder))
        _load_ema(ema, state["ema"])
        with torch.no_grad():
            for p, a in zip(ema.parameters, ema.averages[sigma_rel]):
                p.copy_(a)
