"""How long an iteration will take on a CPU."""

import logging
import re

import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.config import counts
from dfm_nb.data.stores import MockStore
from dfm_nb.training import forecast
from dfm_nb.training.batches import packed_loader

FED = {"model.in_channels": 16, "model.text_dim": 384}


def config_and_packs(recipe, *overrides, sizes=((1, 8, 8), (3, 8, 8))):
    config = cfg.resolve(recipe, overrides=["dataset.num_workers=0", *overrides]).with_derived(FED, "test").config
    return config, packed_loader(config, MockStore(sizes, length=64), 0, 1).next_step()


@pytest.fixture
def said(caplog, one_rank):
    caplog.set_level(logging.INFO, "dfm_nb")
    return lambda: caplog.text


def test_long_iteration_is_forecast_from_the_plans_flops(said, monkeypatch):
    """All tokens of the packs count, padding too: the machine multiplies it."""
    config, packs = config_and_packs("default", "train.global_batch_size=2")
    monkeypatch.setattr(forecast, "measured_rate", lambda config: 1e10 if config.mixed_precision == "bf16" else 9e9)
    forecast.tell(config, packs)
    lengths = [p.lengths(padding=True) for p in packs]
    assert all(sum(q) == 8192 for q, _ in lengths)
    seconds = sum(counts.model_flops(config.model, q, kv) for q, kv in lengths) / 1e10
    assert f"about {forecast.duration(seconds)} on this CPU" in said() and "--recipe demo_bf16 in place" in said()


def test_short_iteration_and_a_gpu_get_no_forecast(said, monkeypatch):
    monkeypatch.setattr(forecast, "measured_rate", lambda config: 1e10)
    forecast.tell(*config_and_packs("demo"))
    long = config_and_packs("default", "train.global_batch_size=2")
    monkeypatch.setattr(parallel, "device", lambda: torch.device("cuda"))
    forecast.tell(*long)
    assert not said()


def test_suggested_recipe_holds_the_samples(said, monkeypatch):
    """A clip of 3,072 tokens does not fit into the demo's packs."""
    monkeypatch.setattr(forecast, "measured_rate", lambda config: 1e10)
    forecast.tell(*config_and_packs("default", "train.global_batch_size=2", sizes=[(3, 64, 64)]))
    (name, setting) = re.search(r"--recipe (\w+) (\S+=3072) in place", said()).groups()
    config_and_packs(name, setting, sizes=[(3, 64, 64)])


def test_recipe_that_is_no_shorter_is_not_suggested(said, monkeypatch):
    monkeypatch.setattr(forecast, "measured_rate", lambda config: 1e8)
    forecast.tell(*config_and_packs("demo"))
    assert "An iteration will take" in said() and "--recipe" not in said()


@pytest.mark.slow
def test_rate_is_of_this_machine_and_uses_no_random_number_of_the_run(one_rank):
    before = torch.get_rng_state()
    rates = [forecast.measured_rate(config_and_packs(name)[0]) for name in cfg.recipes()]
    assert all(1e7 < rate < 1e15 for rate in rates) and torch.equal(before, torch.get_rng_state())
