"""Checkpoint writing that holds training up as little as it can, in megatron-core's torch_dist format.

What is written is the state at the moment of the call, whatever training does next. megatron-core's own way gathers
the distributed optimizer on one rank and copies it several times first. Here every rank writes its own part, so the
training process makes a plan, and then

- on a CPU forks: the child has the state as it is now, and the kernel copies a page only when training changes it;
- on CUDA copies to pinned host memory, as in megatron-core, since a fork would not see device memory.

The result is one of megatron-core's "fully reshardable" checkpoints, which load in any layout: one or two `.distcp`
files a rank, each with its checksum beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import queue
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageWriterTransforms, _write_item
from torch.distributed.checkpoint.planner import WriteItemType

from dfm_nb.base.process import end_with_parent

THREADS = 2
"""Files of a rank, written at the same time."""


# ---- the distributed optimizer's own part -------------------------------------------------------------------------


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) of a part of a tensor."""


def boxes(start: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    """The boxes that elements start .. end of a flattened tensor of this shape make, in order.

    At most 2 n - 1 in n dims. In two: the end of a row, whole rows, the beginning of a row. Elements 2 .. 11 of [3, 4]:

        . . x x    (0, 2) of size (1, 2)
        x x x x    (1, 0) of size (1, 4)
        x x x .    (2, 0) of size (1, 3)
    """
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    row = prod(shape[1:])  # elements in one index of the first dim
    first, last = -(-start // row), end // row  # whole rows: first .. last
    if first > last:  # all within one row
        first = last = start // row
        yield from _in_row(first, start - first * row, end - first * row, shape)
        return
    yield from _in_row(first - 1, start - (first - 1) * row, row, shape)
    if last > first:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(last, 0, end - last * row, shape)


def _in_row(index: int, start: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    for offset, size in boxes(start, end, shape[1:]):
        yield (index, *offset), (1, *size)


def optimizer_shards(
    optimizer: DistributedOptimizer, model: Sequence[ShardedTensor]
) -> tuple[dict[str, Any], list[ShardedTensor]]:
    """What all ranks share of a distributed optimizer's state, and this rank's part of weights and moments.

    The optimizer splits one flat buffer of all parameters over the ranks, so a rank's part of a parameter is a range of
    its flattened elements. A checkpoint wants boxes of whole tensors: each range becomes a few of them. Say layer 5's
    weight is [6, 4], tp gives this rank its rows 3 to 5, and of these 12 elements the optimizer gives it 6 .. 12:

        range of the local part    6 .. 12 of [3, 4]
        boxes of the local part    (1, 2) of size (1, 2);        (2, 0) of size (1, 4)
        boxes of the whole         (5, 4, 2) of size (1, 1, 2);  (5, 5, 0) of size (1, 1, 4), of [layers, 6, 4]

    Parameters
    ----------
    model : the model's own sharded tensors, which say where in the whole a parameter lies.
    """
    of = {sharded.data: sharded for sharded in model}
    shards = []
    # Private: `gbuf_ranges` and `_get_main_param_and_optimizer_states` of 0.16 to 0.19; the public call gathers first.
    for gbuf_ranges in optimizer.gbuf_ranges:
        for buckets in gbuf_ranges.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    states = optimizer._get_main_param_and_optimizer_states(parameter)
                    for kind in ("param", "exp_avg", "exp_avg_sq"):
                        shards += _as_boxes(kind, states[kind], ranges["param"].start, of[parameter])
    common = {**optimizer.state_dict(), "param_state": {}, "param_state_sharding_type": "fully_reshardable"}
    return common, shards


def _as_boxes(kind: str, values: torch.Tensor, start: int, whole: ShardedTensor) -> list[ShardedTensor]:
    """values : elements from `start` on of the flattened parameter that `whole` is this rank's part of."""
    flat, out, at = values.detach().view(-1), [], 0
    lead = whole.prepend_axis_num  # axes of the whole alone, as the layers' number: of size 1 in each box
    for offset, size in boxes(start, start + flat.numel(), whole.local_shape):
        count = prod(size)
        place = [o + d for o, d in zip(whole.global_offset[lead:], offset)]
        out.append(
            replace(
                whole,
                key=f"optimizer.state.{kind}.{whole.key}",
                data=flat[at : at + count].view((1,) * lead + size),
                dtype=flat.dtype,
                local_shape=(1,) * lead + size,
                global_offset=(*whole.global_offset[:lead], *place),
                axis_fragmentations=None,
                prepend_axis_num=0,  # the layers' axis is one of those above now
                replica_id=(*whole.replica_id[:-1], 0),  # other data-parallel ranks have other elements, not copies
            )
        )
        at += count
    return out


# ---- writing ------------------------------------------------------------------------------------------------------


class _Hashed:
    """A file opened for writing that keeps the SHA-256 of what goes through: no second reading for the checksum."""

    def __init__(self, file: BinaryIO):
        self.file, self.sha256, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        self.sha256.update(view)
        self.bytes += len(view)
        return self.file.write(view)

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self.file.flush()


def checksum_file(path: Path) -> Path:
    """Where the size and checksum of a data file wait for the listing of the whole checkpoint."""
    return path.with_name(path.name + ".sha256")


Bucket = tuple[str, str, tuple[list, list]]
"""Of one file: its path, its name in the index, and (plan item, value) of what is not a tensor and of what is."""


def _write_file(bucket: Bucket) -> list:
    path, storage_key, (texts, tensors) = bucket
    transforms, results = _StorageWriterTransforms(), []
    with open(path, "wb") as file:
        stream = _Hashed(file)
        for item, data in (*texts, *tensors):
            if isinstance(data, torch.Tensor) and data.untyped_storage().nbytes() != data.nbytes:
                data = data.clone()  # torch.save would write all of the storage that this is a view of
            format_ = SerializationFormat.TORCH_SAVE
            results.append(_write_item(transforms, stream, data, item, storage_key, format_))  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    checksum_file(Path(path)).write_text(json.dumps({"bytes": stream.bytes, "sha256": stream.sha256.hexdigest()}))
    return results


class _Results:
    """What was written, from the writing process to the training process: a nameless file that both have open.

    megatron-core keeps one more process for this, which imports torch and stays behind when a rank is killed.
    """

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()

    def put(self, results: dict | Exception) -> None:
        pickle.dump(results, self.file)
        self.file.flush()

    def get_nowait(self) -> dict | Exception:
        """`queue.Empty` when the writing process ended without a word, as a killed one does."""
        self.file.seek(0)
        try:
            return pickle.load(self.file)
        except (EOFError, pickle.UnpicklingError):
            raise queue.Empty from None
        finally:
            self.file.close()


def _write_files(trainer: int, _rank: int, buckets: list[Bucket], results: _Results) -> None:
    """Write them all; an error goes with the results. trainer : the pid of the training process.

    Runs in a fork of that process, or in itself for a blocking save.
    """
    if os.getpid() != trainer:
        end_with_parent()
        # Signals go to the whole process group and mean the trainer, which waits for this process to finish.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.nice(5)  # training first
        torch.set_num_threads(1)  # OpenMP's threads did not come along with the fork
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            results.put(dict(enumerate(pool.map(_write_file, buckets))))
    except Exception as error:
        results.put(RuntimeError(str(error)))


class _FileWriter(filesystem_async.FileSystemWriterAsync):
    """megatron-core's, but nothing is copied in the training process of a CPU, and checksums are made on the way."""

    def prepare_write_data(self, plan, planner) -> None:
        self.write_buckets: list[Bucket] = []
        for bucket in filesystem_async._split_by_size_and_type(self.thread_count, plan.items):
            name = f"{plan.storage_data.prefix}{len(self.write_buckets)}.distcp"
            texts = [(i, planner.resolve_data(i)) for i in bucket if i.type == WriteItemType.BYTE_IO]
            tensors = [(i, planner.resolve_data(i).detach()) for i in bucket if i.type != WriteItemType.BYTE_IO]
            if bucket:
                self.write_buckets.append((os.path.join(self.checkpoint_dir, name), name, (texts, tensors)))
        self.results_queue = _Results() if self.write_buckets else None

    def get_save_function_and_args(self):
        if not self.write_buckets:
            return None, None, []
        preload = partial(self.preload_tensors, self.write_buckets, True)
        arguments = [torch.distributed.get_rank(), self.write_buckets, self.results_queue]
        return partial(_write_files, os.getpid()), preload, arguments


def request_of(sharded: dict[str, Any], folder: Path) -> AsyncRequest:
    """The way above for the tensors that `dist_checkpointing` saves: `execute_sync`, or for an `AsyncCallsQueue`."""
    state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    writer = _FileWriter(folder, thread_count=THREADS)
    saved, *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(state), writer, None, 0, planner=planner)
    write, preload, arguments = writer.get_save_function_and_args()
    return AsyncRequest(write, arguments, [partial(save_state_dict_async_finalize, *saved)], preload_fn=preload)
