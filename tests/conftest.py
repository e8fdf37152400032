"""Shared fixtures: ranks, a process group of one, and tiny data and weights, created once for all workers."""

import gc
import io
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Callable

import pytest
from filelock import FileLock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from tests.processes import fork_context

torch.set_num_threads(1)
STORED = Path(__file__).parent / "stored"


def _child(rank, world, store_path, function, args, environment, results):
    import torch.distributed as dist

    from dfm_nb import parallel

    gc.freeze()  # as `tests.processes` does
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ.update(environment | {name: str(value) for name, value in place.items()})
    try:
        dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=world)
        buffer = io.BytesIO()  # values as bytes: tensors sent as such would live in the child's memory
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
    """Run `function(*args)` on `world` ranks with gloo, forked after the imports; the results by rank."""
    context = fork_context()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        common = (function, args, dict(os.environ), results)
        ranks = [context.Process(target=_child, args=(r, world, store, *common)) for r in range(world)]
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
    gc.freeze()  # it has collected, which takes 0.8 s with all modules; the next time it need not look at what is left


@pytest.fixture
def wrong_use(capsys) -> Callable[..., str]:
    """`wrong_use(run, *given)`: what a command that is used wrongly says."""

    def said(run, *given, **more) -> str:
        assert run(*given, **more) == 2
        return capsys.readouterr().err

    return said


@pytest.fixture
def given_away(monkeypatch) -> Callable[..., None]:
    """`given_away(*paths)` makes them another user's, as `os.lstat` tells it: only root could `chown` them."""
    away, lstat = set(), os.lstat

    def told(path, **how):
        found = lstat(path, **how)
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]]) if str(path) in away else found

    monkeypatch.setattr(os, "lstat", told)
    return lambda *paths: away.update(map(str, paths))


@pytest.fixture(scope="session")
def make_once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`make_once(name, make)`: the folder that `make(folder)` fills, once for all workers of
    pytest-xdist. Nobody writes in it afterwards.
    """
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # the worker's own folder is in the one that all share

    def once(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = place / name, place / f"{name}.done"
        with FileLock(place / f"{name}.lock"):
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def tiny_data(make_once):
    """A prepared folder (see `tiny_run`)."""
    from tests import tiny_run

    return make_once("tiny-data", tiny_run.prepare)


@pytest.fixture(scope="session")
def tiny_edits(make_once):
    """A prepared folder of pairs."""
    from tests import tiny_run

    return make_once("tiny-edits", lambda folder: tiny_run.prepare(folder, "synthetic:edits", 12))


@pytest.fixture
def data(tmp_path) -> Path:
    """A copy of the stored data, to be damaged."""
    return shutil.copytree(STORED / "data", tmp_path / "data")


@pytest.fixture
def run(tmp_path) -> Path:
    """A copy of the stored run, which has one whole checkpoint."""
    return shutil.copytree(STORED / "run", tmp_path / "run")


@pytest.fixture(scope="session")
def theirs(make_once):
    """`data` as NeMo DFM's script writes it, its encoders `cosmos` and `t5`, and `butterflies`, as the hub has them."""
    from tests.data import dfm_shards

    return make_once("theirs", dfm_shards.make)


@pytest.fixture(scope="session")
def shards_of_four(make_once):
    """A prepared folder of many shards."""
    from tests import tiny_run

    return make_once("shards-of-four", lambda folder: tiny_run.prepare(folder, "synthetic", 30, "--shard-size", "4"))


@pytest.fixture(scope="session")
def tiny_checkpoint(make_once, tiny_data):
    """A run folder with untrained weights."""
    from tests import tiny_run

    return tiny_run.checkpoint_of("dit", make_once, tiny_data)


@pytest.fixture(scope="module")
def tiny_pipe(tiny_checkpoint):
    """Its pipeline, in one process."""
    from dfm_nb import parallel
    from dfm_nb.generation.pipeline import Pipeline

    parallel.init()
    yield Pipeline.from_checkpoint(tiny_checkpoint)
    parallel.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with long tests first, so that workers with one module each end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
