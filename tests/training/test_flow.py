"""Flow matching through training, its checkpoint and generation."""

import pytest

from dfm_nb.base.metrics import read_metrics
from tests import tiny_run
from tests.tiny_run import VARIANTS

pytestmark = pytest.mark.slow

FLOW = ["model.objective=flow", "model.sigma_data=1", "model.times=uniform", "model.P_mean=0", "model.P_std=1"]
FLOW += ["model.shift_tokens=32", "train.eval_interval=3", "train.eval_iters=2", "validation.samples=false"]


@pytest.fixture(scope="module")
def run(make_once, tiny_data):
    """Of Wan, which is trained so."""
    return make_once("flow-wan", lambda run: tiny_run.train(tiny_data, run, *FLOW, *VARIANTS["wan"]))


def test_checkpoint_samples_as_it_was_trained(run):
    from dfm_nb import Pipeline

    sigmas = next(r for r in read_metrics(run / "metrics.jsonl") if "val_loss" in r)["val_sigmas"]
    assert [s / (1 + s) for s in sigmas] == pytest.approx([(i + 0.5) / len(sigmas) for i in range(len(sigmas))])
    pipe = Pipeline.from_pretrained(run)
    settings = dict(height=32, width=32, num_video_frames=1, num_steps=4, schedule="flow", sampler="euler")
    one, again = (pipe("a red butterfly", **settings)[0] for _ in range(2))
    pipe.config.model.objective = "edm"
    other = pipe("a red butterfly", **settings)[0]
    assert one.latent.equal(again.latent) and one.latent.isfinite().all() and not one.latent.equal(other.latent)
