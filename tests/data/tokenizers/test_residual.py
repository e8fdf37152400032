"""The shipped residual tokenizer against the PCA it contains, and the script that trains it."""

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dfm_nb import inspect, prepare
from dfm_nb.base import plugins
from dfm_nb.checkpoints import weights as checkpoint
from dfm_nb.data.encoding import to_pixels
from dfm_nb.data.prepared_folder import TOKENIZER
from dfm_nb.data.sources import synthetic
from dfm_nb.data.tokenizers import residual
from dfm_nb.export import with_decoder
from scripts import train_tokenizer as script


@pytest.fixture(scope="module")
def tokenizer():
    return plugins.load("tokenizers", "residual").build()


def videos(count=2, frames=9, height=48, width=80, seed=0):
    """Smooth random clips in [-1, 1]."""
    coarse = torch.rand(count, 3, frames, 6, 10, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return torch.nn.functional.interpolate(coarse, (frames, height, width), mode="trilinear")


def psnr_db(made, video):
    return -10 * torch.log10((made.clamp(-1, 1) - video).square().mean() / 4).item()


@pytest.fixture(scope="module")
def unseen():
    """8 images and 8 clips of attribute combinations that training left out, each [1, 3, T, H, W]."""
    source = synthetic.build("unseen", num_images=8, num_clips=8, seed=31)
    drawn = [to_pixels(next(source.read(i)).video)[None] for i in range(16)]
    return {"images": drawn[:8], "clips": drawn[8:]}


@pytest.mark.parametrize("frames", [1, 5, 17])
@pytest.mark.parametrize("height,width", [(48, 80), (64, 64)])
def test_shapes_are_those_of_the_pca(tokenizer, frames, height, width):
    x = videos(2, frames, height, width)
    z = tokenizer.encode(x)
    assert z.shape == tokenizer.pca.encode(x).shape == (2, 16, 1 + (frames - 1) // 4, height // 8, width // 8)
    made = tokenizer.decode(z)
    assert z.dtype == made.dtype == torch.float32 and made.shape == x.shape


@pytest.mark.parametrize("kind, at_least_db", [("images", 3.0), ("clips", 1.2)])
def test_reconstruction_is_better_than_the_pcas(tokenizer, unseen, kind, at_least_db):
    gains = [psnr_db(tokenizer.decode(tokenizer.encode(x)), x) for x in unseen[kind]]
    base = [psnr_db(tokenizer.pca.decode(tokenizer.pca.encode(x)), x) for x in unseen[kind]]
    assert sum(gains) / 8 >= sum(base) / 8 + at_least_db


@pytest.mark.parametrize("noise, at_least_db", [(0.1, 2), (0.4, 3.5)])
def test_gain_outlives_the_errors_a_sampler_makes(tokenizer, unseen, noise, at_least_db):
    """Noise of that share of the latents' spread on both: the gain must not be bought with a brittle code."""
    generator, gain = torch.Generator().manual_seed(0), 0.0
    for x in unseen["images"] + unseen["clips"]:
        for t, sign in ((tokenizer, 1), (tokenizer.pca, -1)):
            z = t.encode(x)
            gain += sign * psnr_db(t.decode(z + noise * torch.randn(z.shape, generator=generator)), x) / 16
    assert gain >= at_least_db


def test_latents_are_nearly_white(tokenizer, unseen):
    for kind, part in (("images", slice(0, 1)), ("clips", slice(1, None))):
        z = torch.cat([tokenizer.encode(x)[:, :, part].transpose(0, 1).flatten(1) for x in unseen[kind]], 1)
        assert z.mean(1).abs().max() < 0.8 and 0.6 < z.std(1).min() and z.std(1).max() < 1.6


def test_coding_is_causal_both_ways(tokenizer):
    x = videos(1, 17)
    y = x.clone()
    y[:, :, 9:] = -y[:, :, 9:]
    z, other = tokenizer.encode(x), tokenizer.encode(y)
    torch.testing.assert_close(other[:, :, :3], z[:, :, :3], atol=1e-5, rtol=0)
    assert (other[:, :, 3:] - z[:, :, 3:]).abs().max() > 0.1
    changed = z.clone()
    changed[:, :, 3:] += 1
    a, b = tokenizer.decode(z), tokenizer.decode(changed)
    torch.testing.assert_close(b[:, :, :9], a[:, :, :9], atol=1e-5, rtol=0)
    assert (b[:, :, 9:] - a[:, :, 9:]).abs().max() > 0.01


def test_first_frame_is_coded_as_an_image(tokenizer):
    x = videos(1, 9)
    torch.testing.assert_close(tokenizer.encode(x)[:, :, :1], tokenizer.encode(x[:, :, :1]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("positions", [1, 60 * 5, 60 * 8, 60 * 22])
def test_windows_give_what_the_whole_gives(tokenizer, monkeypatch, positions):
    x = videos(3, 1 + 4 * 10)  # 60 positions a step, 11 steps
    z = tokenizer.encode(x)
    whole = tokenizer.decode(z)
    monkeypatch.setattr(residual, "WINDOW_POSITIONS", positions)
    torch.testing.assert_close(tokenizer.encode(x), z, atol=1e-5, rtol=0)
    torch.testing.assert_close(tokenizer.decode(z), whole, atol=1e-5, rtol=0)


def test_windows_bound_what_the_network_sees(tokenizer, monkeypatch):
    sizes = []
    hook = tokenizer.decoder.register_forward_hook(lambda _, given, made: sizes.append(given[0].numel() // 16))
    monkeypatch.setattr(residual, "WINDOW_POSITIONS", 60 * 8)
    tokenizer.decode(torch.zeros(2, 16, 40, 6, 10))
    hook.remove()
    assert len(sizes) > 10 and max(sizes) <= 60 * 8


def test_coding_is_deterministic(tokenizer):
    x = videos()
    assert torch.equal(residual.build().encode(x), tokenizer.encode(x))


def test_identity_is_that_of_the_content(tokenizer, tmp_path):
    tokenizer.save(tmp_path / residual.ASSET.name)
    again = residual.build(tmp_path)
    assert again.identity() == tokenizer.identity() and again.identity()["name"] == "residual"
    x = videos(1, 5)
    assert torch.equal(again.decode(again.encode(x)), tokenizer.decode(tokenizer.encode(x)))
    again.encoder.head.bias += 0.1
    assert again.identity()["sha256"] != tokenizer.identity()["sha256"]


def test_file_is_small_and_ships_with_the_package():
    assert residual.ASSET.stat().st_size < 8_000_000
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f"{residual.ASSET.parent.name}/*{residual.ASSET.suffix}" in project


def test_bilateral_filter_takes_noise_and_leaves_edges():
    g = torch.Generator().manual_seed(0)
    edge = torch.where(torch.arange(40) < 20, -0.8, 0.8).expand(1, 3, 2, 24, 40).contiguous()
    torch.testing.assert_close(residual.bilateral(edge), edge, atol=1e-6, rtol=0)
    noisy = edge + 0.05 * torch.randn(edge.shape, generator=g)
    assert (residual.bilateral(noisy) - edge).std() < 0.5 * (noisy - edge).std()


def small(finest_blocks=1, seed=0):
    """A tokenizer of little width whose decoder does something."""
    torch.manual_seed(seed)
    shape = residual.Shape(24, 16, 1, 1, 1, 1, finest_width=8, finest_blocks=finest_blocks)
    model = residual.ResidualTokenizer(residual.build().pca, shape).requires_grad_(False).eval()
    for name, x in model.decoder.named_parameters():
        if "head" in name:
            x.normal_(std=0.05)
    return model


@pytest.mark.parametrize("positions", [60, 130])
def test_windows_give_what_the_whole_gives_with_the_finest_grid(monkeypatch, positions):
    model, x = small(), videos(2, 33, 48, 80)
    z = model.encode(x)
    whole = model.decode(z)
    torch.testing.assert_close(model.forward_decode(z), whole)
    monkeypatch.setattr(residual, "WINDOW_POSITIONS", positions)
    torch.testing.assert_close(model.decode(z), whole)
    torch.testing.assert_close(torch.cat(list(model.decode_windows(z[:1])), 2), whole[:1])


def test_export_carries_another_decoder_of_the_same_encoder(tmp_path):
    """A better decoder serves models that were trained before it; another encoder is refused."""
    one, better = small(), small()
    better.decoder.head.image.bias += 0.2
    one.save(tmp_path / TOKENIZER)
    better.save(tmp_path / "better.safetensors")
    assets = {
        TOKENIZER: (tmp_path / TOKENIZER).read_bytes(),
        "manifest.json": json.dumps({"tokenizer": one.identity(), "latent_mean": [0.0]}).encode(),
    }
    changed = with_decoder(assets, str(tmp_path / "better.safetensors"))
    manifest = json.loads(changed["manifest.json"])
    assert changed[TOKENIZER] == (tmp_path / "better.safetensors").read_bytes()
    assert manifest["tokenizer"] == better.identity() != one.identity() and manifest["latent_mean"] == [0.0]
    better.encoder.head.bias += 0.2
    better.save(tmp_path / "worse.safetensors")
    with pytest.raises(ValueError, match="must have the encoder that the checkpoint was trained with"):
        with_decoder(assets, str(tmp_path / "worse.safetensors"))


def test_calibration_whitens_without_changing_pictures(tokenizer):
    mine = residual.build()
    x = videos()
    before, z = mine.decode(mine.encode(x)), mine.encode(x)
    mine.calibrate(torch.full((2, 16), 0.3), torch.full((2, 16), 2.0))
    torch.testing.assert_close(mine.encode(x), (z - 0.3) / 2, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mine.decode(mine.encode(x)), before, atol=1e-4, rtol=0)


def test_wrong_files_and_shapes_are_named(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train_tokenizer\.py"):
        residual.build(tmp_path / "nothing.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors here")
    with pytest.raises(ValueError, match="not a safetensors file"):
        residual.build(tmp_path / "text.safetensors")
    tokenizer.pca.save(tmp_path / "pca.safetensors")
    with pytest.raises(ValueError, match="not a residual tokenizer"):
        residual.build(tmp_path / "pca.safetensors")
    with pytest.raises(ValueError, match="1 \\+ 4k"):
        tokenizer.encode(torch.zeros(1, 3, 4, 64, 64))
    with pytest.raises(ValueError, match="latents must be"):
        tokenizer.decode(torch.zeros(1, 8, 1, 8, 8))


# ---- the script that trains it ------------------------------------------------------------------------------------

TINY = json.dumps({"width": 8, "fine_width": 8, "encoder_blocks": 1, "decoder_blocks": 1, "decoder_fine_blocks": 1})


def test_training_batches_are_pure_and_leave_out_what_is_measured():
    a, b = script.Batches(3, 10), script.Batches(3, 10)
    b[5]
    for x, y, mirrored in zip(a[2], b[2], a[3]):
        assert torch.equal(x, y) and torch.equal(x.flip(3), mirrored)
    assert not any(torch.equal(x, y) for x, y in zip(a[2], a[4]) if x.shape == y.shape)


def settings(**changed):
    """Of `step_loss`, with strong noise on no sample."""
    defaults = {
        "seed": 0,
        "noise": 0.05,
        "spread": 0.0,
        "stay": 0.0,
        "strong_noise": 3.0,
        "strong_share": 0.0,
        "clips_weight": 1.0,
    }
    return argparse.Namespace(**defaults | changed)


def test_clips_count_as_often_as_they_are_told_to(tokenizer):
    image, clip = (torch.from_numpy(synthetic.render({}, 3, 64, 64, t))[None] for t in (1, 9))
    once, thrice = (
        script.step_loss(tokenizer, (image, clip), settings(clips_weight=w), 0)[0].item() for w in (1.0, 3.0)
    )
    images, _ = script.step_loss(tokenizer, (image,), settings(), 0)
    assert thrice - images.item() == pytest.approx(3 * (once - images.item()), rel=1e-4)


def test_strong_noise_hits_the_share_of_latents_it_is_told(tokenizer):
    """The PSNR during training falls with the noise, and a share of 0 is as if strong noise were not there."""
    drawn = torch.from_numpy(synthetic.render({}, 3, 64, 64)).expand(16, -1, -1, -1, -1)

    def psnr(**changed):
        return script.step_loss(tokenizer, (drawn,), settings(**changed), 0)[1][0]

    none, half, whole = (psnr(strong_share=x) for x in (0.0, 0.5, 1.0))
    assert none > half + 1 and half > whole + 1
    assert psnr(strong_share=0.0, strong_noise=9.0) == none


@pytest.mark.slow
def test_training_goes_on_from_a_tokenizer(tmp_path, monkeypatch):
    """Size and statistics are the file's; the settings name it by its hash, so that a resumed run cannot mix two."""
    monkeypatch.setattr(script, "CALIBRATION_BATCHES", 1)
    monkeypatch.setattr(script, "HELD_OUT", 2)
    shape = residual.Shape(**json.loads(TINY))
    first = residual.ResidualTokenizer(residual.build().pca, shape)
    first.calibrate(torch.full((2, 16), 0.5), torch.full((2, 16), 2.0))
    first.save(tmp_path / "first.safetensors")

    def train(start, steps):
        argv = [
            "train_tokenizer.py",
            "--run-dir",
            str(tmp_path / "run"),
            "--output",
            str(tmp_path / "second.safetensors"),
            "--steps",
            str(steps),
            "--start-from",
            str(start),
            "--strong-noise",
            "1.5",
            "--strong-share",
            "0.6",
        ]
        monkeypatch.setattr(sys, "argv", argv)
        script.main()

    train(tmp_path / "first.safetensors", 2)
    second = residual.build(tmp_path / "second.safetensors")
    assert second.shape == shape and second.identity() != residual.build(tmp_path / "first.safetensors").identity()
    settings = json.loads((tmp_path / "run" / "result.json").read_text())["settings"]
    assert settings["start_from"] == residual.build(tmp_path / "first.safetensors").identity()["sha256"]
    assert settings["strong_noise"] == 1.5 and settings["strong_share"] == 0.6
    with pytest.raises(SystemExit, match="another training"):
        train(tmp_path / "second.safetensors", 3)


@pytest.mark.slow
def test_stopped_training_goes_on_as_if_it_had_not_been(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "FIT_ITEMS", 20)
    monkeypatch.setattr(script, "CALIBRATION_BATCHES", 1)
    monkeypatch.setattr(script, "HELD_OUT", 2)
    made = {}
    for name, limits in (("whole", [None]), ("stopped", ["0", None])):
        for limit in limits:
            stop = [] if limit is None else ["--max-minutes", limit]
            monkeypatch.setattr(
                sys,
                "argv",
                [
                    "train_tokenizer.py",
                    "--run-dir",
                    str(tmp_path / name),
                    "--output",
                    str(tmp_path / f"{name}.safetensors"),
                    "--steps",
                    "3",
                    "--shape",
                    TINY,
                    "--log-every",
                    "1",
                    *stop,
                ],
            )
            script.main()
        made[name] = load_file(tmp_path / f"{name}.safetensors")
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [r["step"] for r in rows] == [1, 2, 3]
    assert made["whole"].keys() == made["stopped"].keys()
    for name, tensor in made["whole"].items():  # float16: a rounding may fall the other way
        torch.testing.assert_close(made["stopped"][name].float(), tensor.float(), rtol=2e-3, atol=1e-4)
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["identity"]["name"] == "residual"


@pytest.mark.slow
def test_data_carry_the_tokenizer_that_made_them(tmp_path):
    """The weights in the package may change: latents are decoded with the file beside them."""
    other = residual.build()
    other.encoder.head.bias += 0.1
    other.save(tmp_path / "other.safetensors")
    argv = [
        "--source",
        "synthetic",
        "--num-images",
        "36",
        "--num-clips",
        "4",
        "--tokenizer",
        "residual",
        "--tokenizer-path",
        str(tmp_path / "other.safetensors"),
        "--output-dir",
        str(tmp_path / "d"),
    ]
    assert prepare.main(argv) == 0
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert (
        manifest["tokenizer"]
        == residual.build(tmp_path / "other.safetensors").identity()
        != residual.build().identity()
    )
    assert residual.build(tmp_path / "d").identity() == manifest["tokenizer"]
    assert inspect.build_tokenizer(tmp_path / "d", manifest, None, None).identity() == manifest["tokenizer"]
    assert checkpoint.read_assets(tmp_path / "d").keys() == set(checkpoint.ASSETS) - {checkpoint.STATISTICS}
    assert manifest["psnr_db"]["images"] > 20


@pytest.mark.slow
def test_prepare_records_the_tokenizer_and_its_psnr(tmp_path, tokenizer):
    argv = [
        "--source",
        "synthetic",
        "--num-images",
        "36",
        "--num-clips",
        "4",
        "--tokenizer",
        "residual",
        "--output-dir",
        str(tmp_path / "d"),
    ]
    assert prepare.main(argv) == 0
    manifest = json.loads((tmp_path / "d" / "manifest.json").read_text())
    assert manifest["tokenizer"]["sha256"] == tokenizer.identity()["sha256"]
    assert manifest["psnr_db"]["images"] > 20
