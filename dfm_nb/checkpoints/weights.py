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

import contextlib
import gc
import json
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from dfm_nb import config as cfg
from dfm_nb.base.runs import iteration_folders, iteration_name, write_atomically
from dfm_nb.checkpoints.background import SaveStrategy, checksum_file, optimizer_shards
from dfm_nb.data.shards import sha256, sync
from dfm_nb.model.ema import PowerEMA
from dfm_nb.model.linear import is_lora
from dfm_nb.parallel.groups import global_name, mpu, shard_dim
from dfm_nb.training.muon import Muon

TRACKER = "latest_checkpointed_iteration.txt"
CHECKSUMS = "checksums.json"
_LAYOUT_FREE = {
    "distrib_optim_sharding_type": "fully_reshardable",  # the one form that continues exactly in another layout
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


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
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "Path"},
    }  # fmt: skip

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


@dataclass
class Pieces:
    """What a checkpoint is made of."""

    chunks: Sequence  # unwrapped DiT chunks of this rank
    optimizer: object
    scheduler: object
    ema: PowerEMA


def _model_state(chunks, metadata) -> dict:
    state = {}
    for i, chunk in enumerate(chunks):
        state["model" if len(chunks) == 1 else f"model{i}"] = chunk.sharded_state_dict(metadata=metadata)
    return state


def _ema_state(ema: PowerEMA, model_state: dict) -> dict:
    """The averages, sharded as the weights they average, in float32."""
    out: dict = {}
    for sigma_rel in ema.sigma_rels:
        for (chunk_key, chunk_state), averages in zip(model_state.items(), ema.named(sigma_rel)):
            for name, sharded in chunk_state.items():
                if isinstance(sharded, ShardedTensor) and name in averages:
                    value = averages[name]
                    out[f"ema.{sigma_rel:g}.{chunk_key}.{name}"] = replace(
                        sharded, key=f"ema.{sigma_rel:g}.{sharded.key}", data=value, dtype=value.dtype
                    )
    return out


def _sharded_state(pieces: Pieces, loading: bool) -> dict:
    metadata = dict(_LAYOUT_FREE)
    state = _model_state(pieces.chunks, metadata)
    flat = {k: v for chunk in state.values() for k, v in chunk.items()} if len(pieces.chunks) == 1 else state
    distributed = [o for o in pieces.optimizer.chained_optimizers if isinstance(o, DistributedOptimizer)]
    if loading or not distributed:
        state["optimizer"] = pieces.optimizer.sharded_state_dict(
            flat if len(pieces.chunks) == 1 else state, is_loading=loading, metadata=metadata
        )
    else:  # the same content, but from the ranks that have it
        assert len(pieces.optimizer.chained_optimizers) == 1
        tensors = [t for k, chunk in state.items() for t in chunk.values() if isinstance(t, ShardedTensor)]
        state["optimizer"], state["optimizer_shards"] = optimizer_shards(distributed[0], tensors)
    model_only = {k: v for k, v in state.items() if k.startswith("model")}
    state["ema"] = _ema_state(pieces.ema, model_only)
    state["scheduler"] = pieces.scheduler.state_dict()
    return state


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: a plan is some 100,000 objects that are all needed, and each search through them holds training up."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Writer:
    """Saves under one root; asynchronous saves are finished by `poll` (each step) and `finish`."""

    def __init__(
        self, root: str | Path, keep_last: int = 0, keep_every: int | None = None, asynchronous: bool = False, say=print
    ):
        self.root, self.keep_last, self.keep_every, self.say = Path(root), keep_last, keep_every, say
        self._queue = AsyncCallsQueue() if asynchronous else None
        self._strategy, self._validated = SaveStrategy(), False
        self._closing = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # used on rank 0
        self._closed: Future | None = None  # the last asynchronous save's, on rank 0
        self._unconfirmed = False  # on every rank: written, but rank 0 may not have closed it

    @_no_collection()
    def save(
        self, pieces: Pieces, iteration: int, state: dict, config_yaml: str, assets: Mapping[str, bytes] | None = None
    ) -> None:
        """Write `iter_<iteration>`; `assets` are small files (name -> content) that generation needs."""
        final = self.root / iteration_name(iteration)
        temporary = final.with_name(final.name + ".tmp")
        self.finish()
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier()
        self._pending = final
        with self._explained():
            request = dist_checkpointing.save(
                _sharded_state(pieces, loading=False),
                str(temporary),
                sharded_strategy=self._strategy,
                validate_access_integrity=not self._validated,  # the next ones have the same parts
                async_sharded_save=self._queue is not None,
                content_metadata=dict(_LAYOUT_FREE),
                # each rank's optimizer has a note of its own among the unsharded values, which is not saved
                preprocess_common_before_consistancy_check=lambda common: {
                    k: v for k, v in common.items() if k != "optimizer"
                },
            )
        self._validated = True
        small = {"state.json": json.dumps(state).encode(), "config.yaml": config_yaml.encode(), **(assets or {})}
        if self._queue is None:
            dist.barrier()
            with self._explained():
                if dist.get_rank() == 0:
                    self._finalize(temporary, final, small)
            dist.barrier()
        else:
            request.add_finalize_fn(lambda: self._finalize_in_background(temporary, final, small))
            self._queue.schedule_async_request(request)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """A fault of the disk becomes one sentence of one rank; what is whole stays as it is."""
        try:
            yield
        except (CheckpointException, OSError) as error:
            if dist.get_rank() != 0:
                raise SystemExit(2) from None  # CheckpointException reaches all ranks
            whole = whole_checkpoints(self.root)
            last = f"the last good one is {whole[-1].name}" if whole else "there is none before it"
            free_gib = shutil.disk_usage(self.root).free / 2**30
            cause = str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")
            raise ValueError(
                f"the checkpoint {self._pending.name} could not be written to {self.root} ({free_gib:.1f} GiB free; {cause}); {last}: "
                "make room or lift the quota and give the same command again"
            ) from None

    def _finalize(self, temporary: Path, final: Path, small: Mapping[str, bytes]) -> None:
        """On rank 0: the small files, the listing of all checksums, the final name, and then the pointer."""
        for name, content in small.items():
            (temporary / name).write_bytes(content)
        listing = {}
        for name in data_files(temporary):  # on disk already
            waiting = checksum_file(temporary / name)
            if not waiting.is_file() or not (temporary / name).is_file():
                raise OSError(f"{name} is not there: all nodes must share this folder")
            listing[name] = json.loads(waiting.read_text())
            waiting.unlink()
        for path in sorted(p for p in temporary.iterdir() if p.is_file() and p.name not in listing):
            listing[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
            sync(path)
        (temporary / CHECKSUMS).write_text(json.dumps(listing, indent=1))
        sync(temporary / CHECKSUMS)
        sync(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        write_atomically(self.root / TRACKER, str(iteration_of(final)).encode())
        sync(self.root)
        self.say(f"Checkpoint saved: {final}/")
        self._prune()

    def _finalize_in_background(self, temporary: Path, final: Path, small: Mapping[str, bytes]) -> None:
        self._unconfirmed = True
        if dist.get_rank() == 0:
            self._closed = self._closing.submit(self._finalize, temporary, final, small)

    def _prune(self) -> None:
        if not self.keep_last:
            return
        for folder in whole_checkpoints(self.root)[: -self.keep_last]:
            if not (self.keep_every and iteration_of(folder) % self.keep_every == 0):
                shutil.rmtree(folder)

    @property
    def busy(self) -> bool:
        """Whether an asynchronous save is being written; the same on every rank."""
        return self._queue is not None and self._queue.get_num_unfinalized_calls() > 0

    @_no_collection()
    def poll(self) -> None:
        """Finish asynchronous saves whose writing is done on every rank; cheap when there is none."""
        with self._explained():
            if self._closed is not None and self._closed.done():
                self._closed.result()
            if self.busy:
                self._queue.maybe_finalize_async_calls(blocking=False)

    def finish(self) -> None:
        """Wait until the last save is whole."""
        with self._explained():
            if self.busy:
                self._queue.maybe_finalize_async_calls(blocking=True)
            if self._closed is not None:
                self._closed.result()
        if self._unconfirmed:
            dist.barrier()
        self._closed, self._unconfirmed = None, False

    def close(self) -> None:
        self.finish()
        if self._queue is not None:
            self._queue.close()
        self._closing.shutdown()


def read_state(folder: Path) -> dict:
    return json.loads((folder / "state.json").read_text())


def seed_optimizer_state(optimizer) -> None:
    """torch's AdamW makes its state at the first step, but a distributed optimizer loads into state that is there."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state[p]:
                    moments = inner.moments(p) if isinstance(inner, Muon) else ("exp_avg", "exp_avg_sq")
                    inner.state[p].update(
                        step=torch.zeros((), device=p.device), **{name: torch.zeros_like(p.data) for name in moments}
                    )


def load(pieces: Pieces, folder: Path) -> dict:
    """Load everything into `pieces`, in this layout; returns the JSON state. The folder must have passed `verify`."""
    seed_optimizer_state(pieces.optimizer)
    state = dist_checkpointing.load(_sharded_state(pieces, loading=True), str(folder))
    _load_model(pieces.chunks, state)
    pieces.optimizer.load_state_dict(state["optimizer"])
    pieces.scheduler.load_state_dict(state["scheduler"])
    _load_ema(pieces.ema, state["ema"])
    return read_state(folder)


def _load_model(chunks, state: dict) -> None:
    for i, chunk in enumerate(chunks):
        values = state["model" if len(chunks) == 1 else f"model{i}"]
        _, unexpected = chunk.load_state_dict(values, strict=False)
        assert not unexpected, unexpected


@torch.no_grad()
def _load_ema(ema: PowerEMA, values: dict) -> None:
    for sigma_rel in ema.sigma_rels:
        for i, averages in enumerate(ema.named(sigma_rel)):
            chunk_key = "model" if len(ema.chunks) == 1 else f"model{i}"
            for name, average in averages.items():
                average.copy_(values[f"ema.{sigma_rel:g}.{chunk_key}.{name}"])


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
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "in_channels", "text_dim", "patch_spatial",
    "patch_temporal", "adaln_lora_dim", "pooled_text", "rope",
)  # fmt: skip
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
