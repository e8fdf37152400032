"""One process group of one rank for tests that need megatron-core's parallel state, and ranks of their own for those that need more."""

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


def _child(rank, world, store_path, function, args, environment, results):
    import torch.distributed as dist

    from dfm_nb import parallel

    os.environ.update(
        environment, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world)
    )
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


def clean_processes():
    """Starts processes from a server that has done the imports and nothing else: a fork of this process would carry half of its process groups."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.conftest", "dfm_nb.train", "dfm_nb.generate"])
    return context


def run_ranks(world: int, function, *args, timeout_s: float = 120) -> list:
    """Run `function(*args)` on `world` ranks with gloo; the results by rank. Imports are paid for once."""
    context = clean_processes()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_child, args=(r, world, store, function, args, dict(os.environ), results))
            for r in range(world)
        ]
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


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A prepared folder (see `tiny_run`)."""
    from tests import tiny_run

    return tiny_run.prepare(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_data):
    """A run folder whose weights mean nothing."""
    from tests import tiny_run

    return tiny_run.train(tiny_data, tiny_data.parent / "run")


@pytest.fixture(scope="module")
def tiny_pipe(tiny_checkpoint):
    """Its pipeline, in one process."""
    from dfm_nb import parallel
    from dfm_nb.generation.pipeline import Pipeline

    parallel.init()
    yield Pipeline.from_checkpoint(tiny_checkpoint)
    parallel.shutdown()
