"""The script that trains the residual tokenizer's decoder: the encoder stays, and a stopped training goes on."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from dfm_nb.data.tokenizers import residual


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    module = importlib.import_module("train_decoder")
    monkeypatch.setattr(importlib.import_module("train_tokenizer"), "HELD_OUT", 2)
    return module


def test_errors_count_where_the_picture_is_flat(script):
    """The same error on flat ground and on a checkerboard; a shift of all pixels less than noise of its size."""
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    board = ((x // 2 + y // 2) % 2).float().expand(1, 3, 32, 32) - 0.5
    flat, noise = (
        torch.zeros(1, 3, 32, 32),
        0.05 * torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
    )
    assert script.masked_error(flat + noise, flat) > 5 * script.masked_error(board + noise, board)
    assert script.masked_error(flat + 0.05, flat) < script.masked_error(flat + noise, flat)
    assert script.masked_error(board, board) == 0


def test_pictures_are_whole_or_parts_on_white(script, tmp_path):
    Image.new("RGBA", (40, 20), (255, 0, 0, 128)).save(tmp_path / "a.png")
    (pictures,) = script.load_pictures([tmp_path])
    assert pictures[0, 0].tolist() == [255] * 3 and pictures[48, 48].tolist() == [255, 127, 127]
    images, clips = script.Mixed(0, 8, pictures[None])._draw(1)
    assert images.dtype == clips.dtype == torch.uint8 and images.ndim == clips.ndim == 5
    assert script.Mixed(0, 8, pictures[None])._picture(np.random.default_rng(0)).shape == (64, 64, 3)


@pytest.mark.slow
def test_only_the_decoder_changes_and_a_stopped_training_goes_on(script, tmp_path, monkeypatch):
    made = {}
    for name, limits in (("whole", [None]), ("stopped", ["0", None])):
        for limit in limits:
            argv = ["train_decoder.py", "--run-dir", str(tmp_path / name), "--steps", "3", "--log-every", "1"]
            argv += ["--output", str(tmp_path / f"{name}.safetensors")]
            argv += [] if limit is None else ["--max-minutes", limit]
            monkeypatch.setattr(sys, "argv", argv)
            script.main()
        made[name] = load_file(tmp_path / f"{name}.safetensors")
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in rows] == [1, 2, 3]
    for name, tensor in made["whole"].items():
        torch.testing.assert_close(made["stopped"][name].float(), tensor.float(), rtol=2e-3, atol=2e-4)
    new, old = residual.build(tmp_path / "whole.safetensors"), residual.build()
    assert residual.same_latents(new, old) and new.identity() != old.identity()
    monkeypatch.setattr(sys, "argv", [*argv, "--seed", "1"])
    with pytest.raises(SystemExit, match="another training"):
        script.main()
