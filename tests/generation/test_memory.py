"""The memory estimate: against measured peaks, and monotone."""

import multiprocessing
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dfm_nb import config as cfg
from dfm_nb.diffusion.objective import EDM
from dfm_nb.generation.memory import GIB, Work, estimate

MODEL = cfg.resolve(None, overrides=["model.size=DiT-XL", "model.in_channels=16"]).config.model
WORK = Work(MODEL, weight_bytes=2 * GIB, batch=4, t=31, h=90, w=160, number_bytes=2)


def test_estimate_grows_with_the_work_and_falls_with_the_layout():
    base = estimate(WORK)
    for change in ({"batch": 5}, {"t": 32}, {"h": 92}, {"w": 162}, {"text_tokens": 64}):
        assert estimate(replace(WORK, **change)).total > base.total, change
    assert estimate(replace(WORK, halves=1)).activations * 2 == base.activations
    for change in ({"cp": 2}, {"tp": 2}):
        assert estimate(replace(WORK, **change)).activations < base.activations, change
    assert base.total == base.weights + base.activations + base.text + base.state


def measured_growth(connection, cases: list[tuple[int, int, int]]) -> None:
    """In a process of its own: how far one guided call pushes the peak of resident memory, and the estimate."""
    from dfm_nb import parallel

    parallel.init()
    connection.send([growth(*case) for case in cases])
    connection.close()


def growth(hidden: int, side: int, batch: int) -> tuple[int, int, int]:
    """(bytes grown, bytes estimated, tokens) of two layers of that width on latents of side x side."""
    import gc

    import torch

    from dfm_nb.model.build import build_chunks
    from dfm_nb.model.denoiser import PackDenoiser
    from dfm_nb.packs.packs import Draw, PackSettings, pack_draws

    shape = {"hidden_size": hidden, "num_layers": 2, "num_attention_heads": 8, "in_channels": 16, "text_dim": 64}
    overrides = [*(f"model.{k}={v}" for k, v in shape.items()), "dataset.mock=true", "mixed_precision=fp32"]
    config = cfg.resolve(None, overrides=overrides).config
    m, settings = config.model, PackSettings.of(config)
    _, chunks = build_chunks(m, "fp32", seed=0)
    chunks[0].eval().requires_grad_(False)
    latent, text = torch.zeros(16, 1, side, side), torch.zeros(8, m.text_dim, dtype=torch.bfloat16)
    pack = pack_draws([Draw(f"{i:03d}", latent, text, 24.0, 1.0, latent) for i in range(2 * batch)], settings)
    denoiser = PackDenoiser(chunks, pack, EDM(0.5), torch.device("cpu"))
    x = torch.zeros(pack.x0.shape, dtype=torch.float64)
    denoiser(x, 1.0)  # buffers of the libraries, and the text's keys and values
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    denoiser(x, 1.0)
    wanted = estimate(Work(m, 0, batch, 1, side, side, text_tokens=8))
    return resident("VmHWM") - before, wanted.activations, len(x)


def resident(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.slow
def test_estimate_is_near_the_measured_peak(monkeypatch):
    """Freed memory goes back to the system at once, or a call would take again unseen what an earlier one has freed."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    cases = [(256, 64, 4), (512, 32, 8)]
    process = context.Process(target=measured_growth, args=(there, cases))
    process.start()
    there.close()
    assert here.poll(200), "the measurement did not end"
    measured = here.recv()
    process.join()
    for (hidden, *_), (grown, estimated, tokens) in zip(cases, measured, strict=True):
        said = f"{tokens} tokens of {hidden}: grown {grown >> 20} MiB, estimated {estimated >> 20} MiB"
        print(said)
        assert 0.85 < estimated / grown < 1.2, said
