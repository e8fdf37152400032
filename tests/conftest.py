"""One process group of one rank for tests that need megatron-core's parallel state, and forked ranks for those that need more."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import tempfile
import traceback

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)


def _child(rank, world, store_path, function, args, results):
    import torch.distributed as dist

    from dfm_nb import parallel

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    try:
        dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=world)
        buffer = io.BytesIO()  # whole values as bytes: tensors sent as such would live in the child's memory
        torch.save(function(*args), buffer)
        results.put((rank, True, buffer.getvalue()))
        parallel.shutdown()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        sys.stdout.flush()
        os._exit(0)


def run_ranks(world: int, function, *args, timeout_s: float = 120) -> list:
    """Run `function(*args)` on `world` forked ranks with gloo; the results by rank. Imports are paid for once."""
    import dfm_nb.train  # noqa: F401 - imported before forking

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [context.Process(target=_child, args=(r, world, store, function, args, results)) for r in range(world)]
        for p in ranks:
            p.start()
        out = {}
        try:
            for _ in ranks:
                rank, ok, value = results.get(timeout=timeout_s)
                if not ok:
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                out[rank] = torch.load(io.BytesIO(value), weights_only=False)
        finally:
            for p in ranks:
                p.join(5)
                if p.is_alive():
                    p.kill()
    return [out[r] for r in range(world)]


@pytest.fixture
def one_rank():
    """megatron-core's parallel state for a single process."""
    from dfm_nb import parallel

    parallel.init()
    yield
    parallel.shutdown()
