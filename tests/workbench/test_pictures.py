"""Pictures of ideas: the numbers that they tell, in closed form; nothing is cut off; they read without eyes."""

import re

import numpy as np
import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb.base.records import Clip
from dfm_nb.base.seeds import generator_for
from dfm_nb.data.loader import build_pack
from dfm_nb.data.order import PackOrder
from dfm_nb.data.stores import ShardStore
from dfm_nb.diffusion import edm, samplers
from dfm_nb.packs.packs import PackSettings
from tests.frames import noise
from tests.json_files import write_lines
from workbench import pictures

PROMPT = "a red moth over a meadow"


def given(frames=5, height=32, width=48) -> Clip:
    return Clip("a", noise(frames, height, width), PROMPT, 12.0, "test")


def numbers(picture: pictures.Picture) -> list[float]:
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", picture.summary)]


def check(picture: pictures.Picture) -> pictures.Picture:
    """Its drawing stays inside of it; its HTML has the picture and what it shows."""
    page = picture._repr_html_()  # the layout is settled when it is drawn
    inside = picture.figure.get_tightbbox()
    width, height = picture.figure.get_size_inches()
    assert inside.x0 >= 0 and inside.y0 >= 0 and inside.x1 <= width and inside.y1 <= height, (inside, width, height)
    assert page.startswith('<img src="data:image/png;base64,') and f"width:{round(width * 96)}px" in page
    assert f'alt="{picture.summary[:20]}' in page
    return picture


@pytest.mark.slow
def test_pack_shares_are_those_of_the_packs_of_training(tiny_data):
    capacity, count = 200, pictures.PACKS_COUNTED
    picture = check(pictures.packs(tiny_data, capacity))
    config = cfg.resolve("demo").config
    store = ShardStore(tiny_data, "train")
    settings = PackSettings(config, store.statistics)
    order = PackOrder(store, settings, capacity, config.dataset.packing_buffer_size)
    packs = [build_pack(order, order.next()) for _ in range(count)]
    used = sum(pack.num_tokens for pack in packs)
    padded = sum(len(pack.keys) * max(pack.lengths()[0]) for pack in packs)
    assert numbers(picture) == [capacity, round(100 * used / (capacity * count), 1), round(100 * used / padded, 1)]


def test_schedules_count_the_steps_within_the_noise_of_training():
    """Of the defaults of the settings."""
    picture = check(pictures.schedules(num_steps=12))
    low, high = np.exp([0.2 - 2 * 1.4, 0.2 + 2 * 1.4])
    for name, schedule in samplers.SCHEDULES.items():
        levels = schedule(12)[:-1]
        assert f"{name} {int(((levels > low) & (levels < high)).sum())}" in picture.summary


@pytest.fixture
def silent(tiny_pipe, monkeypatch):
    """The network that answers 0: D = c_skip x."""
    for p in tiny_pipe.chunks[0].final.parameters():
        monkeypatch.setattr(p, "data", torch.zeros_like(p))
    return tiny_pipe


@pytest.mark.slow
def test_losses_of_a_network_that_answers_zero_are_those_of_the_target(silent):
    sigmas = (0.1, 2.0)
    y = silent.encode_pixels(given().video)
    picture = check(pictures.loss_of_model(silent, [given()], sigmas))
    for j, sigma in enumerate(sigmas):
        level = torch.tensor(sigma, dtype=torch.float64)
        eps = torch.randn(y.shape, generator=generator_for("pictures", 0, j), dtype=y.dtype)
        expected = edm.effective_target(y, eps, level, silent.sigma_data).square().mean()
        assert picture.summary.count(f"{expected:.2f} at {sigma:g}") == 2, "with caption and without"
    assert "N(-0.4, 1)" in picture.summary or "N(0.2, 1.4)" in picture.summary


def test_losses_of_a_run_are_its_first_last_and_middle_rounds(tmp_path):
    of = lambda i: {"val_loss": 1 / i, "val_sigmas": [0.5, 2.0], "val_loss_by_sigma": [1 / i, 0.5 / i]}  # noqa: E731
    rounds = [{"iteration": i, **of(i)} for i in range(1, 8)]
    write_lines(tmp_path / "metrics.jsonl", rounds)
    (tmp_path / "config.yaml").write_text(cfg.to_yaml(cfg.resolve("demo", overrides=["model.P_mean=0.7"])))
    told = check(pictures.loss_of_run(tmp_path)).summary
    assert re.findall(r"iteration (\d+)", told) == ["1", "4", "7"]
    assert "0.14 at 0.5, 0.07 at 2" in told and "N(0.7, 1)" in told
