"""The loader on traces of the published architecture, and its windows and tiles on a network that has no context."""

import logging
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dfm_nb.data.tokenizers import cosmos_cv
from tests.data import encoder_files
from tests.refusals import refused

pytestmark = pytest.mark.slow  # networks, process groups or whole preparations in most of them


@pytest.fixture(scope="module")
def folder(theirs):
    return theirs / "cosmos"


@pytest.fixture(scope="module")
def half(make_once):
    """A bfloat16 trace, as the published files are."""
    return make_once("cosmos-bf16", lambda place: encoder_files.save_cosmos(place, torch.bfloat16))


def video(frames, height=32, width=48, batch=1):
    return torch.rand(batch, 3, frames, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


def off(a, b):
    """Root mean square of the difference, as a share of the standard deviation of b."""
    return ((a - b).square().mean().sqrt() / b.std()).item()


# ---- the published architecture -----------------------------------------------------------------------------------


@pytest.mark.parametrize("frames, height, width", [(1, 16, 24), (121, 32, 48)])
def test_whole_clip_is_one_call_of_the_network(folder, frames, height, width):
    """Any size from one trace; 121 frames are the reference recipe's clip."""
    encoder, decoder = encoder_files.cosmos()
    tokenizer, x = cosmos_cv.build(folder), video(frames, height, width, batch=2)
    z = tokenizer.encode(x)
    assert z.shape == (2, 16, 1 + (frames - 1) // 4, height // 8, width // 8) and z.dtype == torch.float32
    torch.testing.assert_close(z, encoder(x)[0], atol=1e-5, rtol=1e-5)
    again = tokenizer.decode(z)
    assert again.shape == x.shape
    torch.testing.assert_close(again, decoder(z), atol=1e-4, rtol=1e-4)


def test_coding_is_causal_and_sees_all_of_the_past(folder):
    tokenizer, x = cosmos_cv.build(folder), video(41)
    z, later, earlier = tokenizer.encode(x), x.clone(), x.clone()
    later[:, :, 21:], earlier[:, :, :1] = 0, 0
    assert torch.equal(tokenizer.encode(later)[:, :, :6], z[:, :, :6])
    assert (tokenizer.encode(earlier)[:, :, -1] - z[:, :, -1]).abs().max() > 1e-5  # 40 frames further
    made, changed = tokenizer.decode(z), z.clone()
    changed[:, :, 6:] = 0
    torch.testing.assert_close(tokenizer.decode(changed)[:, :, :21], made[:, :, :21], atol=1e-5, rtol=0)


def test_short_memory_means_windows_and_a_warning_a_size(folder, monkeypatch, caplog):
    monkeypatch.setattr(cosmos_cv, "available_bytes", lambda device: 1 << 20)
    tokenizer, x = cosmos_cv.build(folder), video(61)
    whole = cosmos_cv.build(folder, tokenizer_window=61).encode(x)
    with caplog.at_level(logging.WARNING, "dfm_nb"):
        codes = [tokenizer.encode(clip) for clip in (x, x)]
        in_windows = cosmos_cv.build(folder, tokenizer_window=49).encode(x)
        assert torch.equal(codes[0], in_windows) and torch.equal(*codes) and not torch.equal(whole, in_windows)
        short = tokenizer.encode(video(9))  # no longer than a window
    assert len(caplog.messages) == 1 and "61x32x48" in caplog.text
    torch.testing.assert_close(short, encoder_files.cosmos()[0](video(9))[0], atol=1e-5, rtol=1e-5)
    monkeypatch.undo()
    assert torch.equal(cosmos_cv.build(folder).encode(x), whole)


def test_memory_needed_grows_with_frames_and_with_the_area_squared(folder, monkeypatch):
    """121 frames of 720x1280 px in float32: 40 GiB of convolutions and 72 of attention."""
    for free, fits in ((113 << 30, True), (111 << 30, False)):
        monkeypatch.setattr(cosmos_cv, "available_bytes", lambda device, free=free: free)
        assert cosmos_cv.build(folder)._fits_whole("decoder", (31, 90, 160)) == fits


def test_bfloat16_trace_runs_in_float32_on_cpu(half):
    """Weights rounded to 8 bits, arithmetic in float32: within 1 % of the float32 network's spread."""
    encoder, decoder = encoder_files.cosmos()
    tokenizer, x = cosmos_cv.build(half), video(9)
    z, reference = tokenizer.encode(x), encoder(x)[0]
    assert z.dtype == torch.float32 and 0 < off(z, reference) < 0.01
    assert off(tokenizer.decode(reference), decoder(reference)) < 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="bfloat16 pooling needs a GPU")
def test_bfloat16_trace_runs_as_it_is_on_cuda(half):
    encoder, decoder = encoder_files.cosmos()
    tokenizer, x = cosmos_cv.build(half, device="cuda"), video(17)
    reference = encoder(x)[0]
    assert off(tokenizer.encode(x).cpu(), reference) < 0.05
    assert off(tokenizer.decode(reference).cpu(), decoder(reference)) < 0.05
    assert {dtype for _, dtype in tokenizer._halves.values()} == {torch.bfloat16}


def test_other_networks_files_are_refused(folder, tmp_path):
    for name in ("encoder", "decoder"):  # the halves in each other's place
        shutil.copy(folder / f"{name}.jit", tmp_path / ("encoder.jit" if name == "decoder" else "decoder.jit"))
    refused(r"encoder\.jit", cosmos_cv.build(tmp_path).encode, video(1))
    torch.jit.script(nn.Identity()).save(str(tmp_path / "decoder.jit"))
    refused(r"decoder\.jit", cosmos_cv.build(tmp_path).decode, torch.zeros(1, 16, 1, 8, 8))
    (tmp_path / "decoder.jit").write_bytes(b"<html>")
    refused(r"decoder\.jit", cosmos_cv.build(tmp_path).decode, torch.zeros(1, 16, 1, 8, 8))


# ---- files --------------------------------------------------------------------------------------------------------


def test_only_the_used_half_is_loaded_and_both_are_named(folder, tmp_path):
    tokenizer = cosmos_cv.build(folder)
    tokenizer.encode(torch.zeros(1, 3, 1, 8, 8))
    assert list(tokenizer._halves) == ["encoder"]
    identity = tokenizer.identity()
    assert identity == cosmos_cv.build(folder).identity() and set(identity["files"]) == {"encoder", "decoder"}
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "decoder.jit").write_bytes((folder / "encoder.jit").read_bytes())
    changed = cosmos_cv.build(other).identity()
    assert changed["sha256"] != identity["sha256"]
    assert changed["files"]["encoder"] == identity["files"]["encoder"] == changed["files"]["decoder"]


def test_new_cache_folder_is_no_hub_id(folder, tmp_path, monkeypatch):
    """As with NeMo DFM, `--tokenizer_cache_dir NEW` is where the download goes."""

    def download(repo_id, filename, cache_dir):
        assert repo_id == cosmos_cv.HUB_ID
        place = cache_dir / "snapshot"
        place.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(folder / filename, place / filename))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    assert cosmos_cv.build("weights/cosmos").encode(video(1)).shape == (1, 16, 1, 4, 6)
    assert (tmp_path / "weights" / "cosmos" / "snapshot" / "encoder.jit").is_file()
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: (_ for _ in ()).throw(OSError("offline")))
    refused(r"encoder\.jit", cosmos_cv.build(tmp_path).encode, video(1), error=FileNotFoundError)


# ---- putting pieces together --------------------------------------------------------------------------------------


class Shrink(nn.Module):
    """Each latent depends on its own pixels only, so that pieces put together must be exactly the whole."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        pooled = F.avg_pool3d(x, (1, 8, 8))
        first = pooled[:, :, :1]
        rest = pooled[:, :, 1:]
        b, c, t, h, w = rest.shape
        z = torch.cat((first, rest.reshape(b, c, t // 4, 4, h, w).mean(3)), 2)
        return (z.repeat(1, 6, 1, 1, 1)[:, :16],)


class Grow(nn.Module):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = z[:, :3].repeat_interleave(8, 3).repeat_interleave(8, 4)
        return torch.cat((x[:, :, :1], x[:, :, 1:].repeat_interleave(4, 2)), 2)


@pytest.fixture(scope="module")
def contextless(tmp_path_factory):
    place = tmp_path_factory.mktemp("contextless")
    torch.jit.script(Shrink()).save(str(place / "encoder.jit"))
    torch.jit.script(Grow()).save(str(place / "decoder.jit"))
    return place


@pytest.mark.parametrize("frames, window", [(1, 17), (9, 17), (121, 17), (49, 49), (121, 49)])
def test_windows_cover_the_clip(contextless, frames, window):
    tokenizer, x = cosmos_cv.build(contextless, tokenizer_window=window), video(frames, 16, 24)
    z = tokenizer.encode(x)
    assert z.shape == (1, 16, 1 + (frames - 1) // 4, 2, 3)
    torch.testing.assert_close(z, Shrink()(x)[0])
    again = tokenizer.decode(z)
    assert again.shape == x.shape
    torch.testing.assert_close(again, Grow()(z))
