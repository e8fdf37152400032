"""The memory estimate: against a measured peak, and monotone."""

import gc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb import parallel
from dfm_nb.diffusion.objective import EDM
from dfm_nb.model.build import build_chunks
from dfm_nb.model.denoiser import PackDenoiser
from dfm_nb.model.inference_memory import sampling_bytes
from dfm_nb.packs.packs import PackSettings, noised, pack_draws
from tests.attacks.reader_memory import status

SIZE = ["model.size=DiT-XL", "model.in_channels=16"]
WORK = {"clips": 4, "grids": [(31, 90, 160)], "bytes_per_number": 2}


def estimate(*overrides: str, **change) -> dict[str, int]:
    return sampling_bytes(cfg.resolve(None, overrides=[*SIZE, *overrides]).config.model, **{**WORK, **change})


def test_estimate_grows_with_the_work_and_falls_with_the_layout():
    base = estimate()
    for change in ({"clips": 5}, {"grids": [(31, 90, 160), (1, 4, 6)]}, {"text_tokens": 64}):
        assert sum(estimate(**change).values()) > sum(base.values()), change
    assert estimate(halves=1)["activations"] * 2 == base["activations"]
    for change in ("model.context_parallel_size=2", "model.tensor_model_parallel_size=2"):
        assert estimate(change)["activations"] < base["activations"], change


def growth(hidden: int, side: int, batch: int) -> tuple[int, int]:
    """(bytes grown, bytes estimated) of one guided call of two layers of that width on latents of side x side."""
    parallel.init()
    shape = {"hidden_size": hidden, "num_layers": 2, "num_attention_heads": 8, "in_channels": 16, "text_dim": 64}
    overrides = [*(f"model.{k}={v}" for k, v in shape.items()), "dataset.mock=true", "mixed_precision=fp32"]
    config = cfg.resolve(None, overrides=overrides).config
    m, settings = config.model, PackSettings(config)
    _, chunks = build_chunks(m, "fp32", seed=0)
    chunks[0].eval().requires_grad_(False)
    latent, text = torch.zeros(16, 1, side, side), torch.zeros(8, m.text_dim, dtype=torch.bfloat16)
    pack = pack_draws([noised(m, f"{i:03d}", latent, latent, text, 1.0, 24.0) for i in range(2 * batch)], settings)
    denoiser = PackDenoiser(chunks, pack, EDM(0.5), torch.device("cpu"))
    x = torch.zeros(pack.x0.shape, dtype=torch.float64)
    denoiser(x, 1.0)  # buffers of the libraries, and the text's keys and values
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = status("VmRSS")
    denoiser(x, 1.0)
    return status("VmHWM") - before, sampling_bytes(m, batch, [(1, side, side)], text_tokens=8)["activations"]


@pytest.mark.slow
def test_estimate_is_near_the_measured_peak(monkeypatch):
    """Freed memory returns to the system at once, so that a call cannot reuse unseen what an earlier one has freed."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        grown, estimated = process.submit(growth, 256, 64, 4).result(200)
    assert 0.85 < estimated / grown < 1.2, (grown, estimated)
