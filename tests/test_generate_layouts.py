"""Eight prompts give the same latents for any batch size, number of processes and layout."""

from math import prod

import pytest
import torch

from tests.conftest import run_ranks
from tests.tiny_run import VARIANTS, checkpoint_of

pytestmark = pytest.mark.slow

COLOURS = "red blue green white orange purple yellow pink".split()
PROMPTS = [f"a {c} butterfly over a meadow{' at night' * (i % 3)}" for i, c in enumerate(COLOURS)]
FAST = {"height": 32, "width": 48, "num_steps": 4, "guidance": 3.0, "num_video_frames": 5, "sampler": "unipc"}


def draw(run, layout: tuple[int, int, int], *batch_sizes: int) -> list[dict[int, torch.Tensor]]:
    """Latents by prompt index, of this rank; drawn once for each batch size."""
    from dfm_nb import parallel
    from dfm_nb.generation.pipeline import Pipeline
    from dfm_nb.generation.request import Request
    from dfm_nb.parallel.groups import Layout, mpu

    layout = Layout(*layout)
    parallel.init(layout, timeout_s=60)
    pipe = Pipeline.from_checkpoint(run, layout=layout)
    requests = [Request(p, index=i, **FAST) for i, p in enumerate(PROMPTS)]
    mine = requests[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
    return [{mine[i].index: g.latent for i, g in pipe.run(mine, size)} for size in batch_sizes]


@pytest.fixture(scope="module", params=VARIANTS)
def each_checkpoint(request, make_once, tiny_data):
    return checkpoint_of(request.param, make_once, tiny_data)


@pytest.fixture(scope="module")
def one_process(each_checkpoint):
    """In batches of 8, 1 and 8."""
    (runs,) = run_ranks(1, draw, each_checkpoint, (1, 1, 1), 8, 1, 8)
    assert all(sorted(latents) == list(range(8)) for latents in runs)
    return runs


def assert_same(latents, expected) -> None:
    for i, latent in latents.items():
        torch.testing.assert_close(latent, expected[i], rtol=1e-4, atol=1e-4)


def test_eight_prompts_give_the_same_latents_in_any_batch(one_process):
    for latents in one_process[1:]:
        assert_same(latents, one_process[0])
    assert all(torch.equal(one_process[-1][i], one_process[0][i]) for i in range(8)), (
        "the same batches give the same bits"
    )


@pytest.mark.parametrize(
    "world, layout, batch_size",
    [(2, (2, 1, 1), 4), (2, (1, 2, 1), 4), (4, (1, 1, 2), 3)],
    ids=["TP2", "PP2", "CP2xDP2"],
)
def test_eight_prompts_give_the_same_latents(each_checkpoint, one_process, world, layout, batch_size):
    ranks = [latents for (latents,) in run_ranks(world, draw, each_checkpoint, layout, batch_size)]
    for latents in ranks:
        assert_same(latents, one_process[0])
        assert len(latents) == 8 * prod(layout) // world, "data-parallel ranks share the prompts"
    assert {i for latents in ranks for i in latents} == set(range(8))
