"""Feature networks: EfficientNet-Lite0 orders sets of pictures sensibly; the others' code on tiny stand-ins."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dfm_nb.data.sources import synthetic
from dfm_nb.evaluation import features
from dfm_nb.evaluation.distance import kernel_distance


@pytest.fixture(scope="module")
def efficientnet():
    return features.build("efficientnet_lite0")


def renders(count: int) -> np.ndarray:
    attributes = synthetic.seen_combinations()
    extra = {"species": "monarch", "posture": "open", "motion": "still"}
    return np.concatenate(
        [synthetic.render({**extra, **attributes[i % len(attributes)]}, i, 64, 64) for i in range(count)]
    )


def test_efficientnet_features_have_their_size_and_do_not_depend_on_the_batch(efficientnet):
    pictures = renders(3)
    rows = efficientnet(pictures)
    assert rows.shape == (3, 1280) and rows.dtype == np.float32
    np.testing.assert_allclose(efficientnet(pictures[1:2]), rows[1:2], rtol=1e-3, atol=1e-4)
    assert np.abs(rows[0] - rows[1]).max() > 0.1


@pytest.mark.slow
def test_efficientnet_orders_disturbances(efficientnet):
    """Real against real is nearest, then a soft blur, then noise (kernel distance: 0.003, 0.10 and 0.67)."""
    pictures = renders(48)
    first, second = pictures[0::2], pictures[1::2]
    blurred = (
        F.avg_pool2d(torch.from_numpy(second).permute(0, 3, 1, 2).float(), 3, 1, 1).permute(0, 2, 3, 1).byte().numpy()
    )
    noise = np.random.default_rng(0).integers(0, 256, second.shape).astype(np.uint8)
    real, *others = (efficientnet(p) for p in (first, second, blurred, noise))
    same, soft, wild = (kernel_distance(real, o) for o in others)
    assert abs(same) < 0.05 and same < soft < wild and wild > 2 * soft


class TinyInception(torch.nn.Module):
    """The published file's signature: pixels 0 to 255, `return_features`."""

    def forward(self, x: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        return x.mean((2, 3)) if return_features else x


def test_inception_gets_pixels_from_0_to_255(tmp_path):
    torch.jit.script(TinyInception()).save(str(tmp_path / "i.pt"))
    network = features.build("inception", tmp_path / "i.pt")
    picture = np.full((2, 20, 30, 3), (10, 100, 250), np.uint8)
    np.testing.assert_allclose(network(picture), [[10, 100, 250]] * 2, atol=0.5)
    (tmp_path / "bad.pt").write_bytes(b"no program")
    with pytest.raises(ValueError, match="is not a TorchScript file"):
        features.build("inception", tmp_path / "bad.pt")


def test_dinov2_from_a_folder_gives_the_class_token(tmp_path):
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14)
    torch.manual_seed(0)
    model = Dinov2Model(config).eval()
    model.save_pretrained(tmp_path)
    picture = np.random.default_rng(0).integers(0, 256, (1, 224, 224, 3)).astype(np.uint8)
    mean, std = (torch.tensor(v)[:, None, None] for v in (features.IMAGENET_MEAN, features.IMAGENET_STD))
    x = (torch.from_numpy(picture).permute(0, 3, 1, 2).float() / 255 - mean) / std
    with torch.no_grad():
        want = model(pixel_values=x).last_hidden_state[:, 0].numpy()
    np.testing.assert_allclose(features.build("dinov2", tmp_path)(picture), want, rtol=1e-3, atol=1e-4)


def test_faults_name_the_fix(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="must be one of efficientnet_lite0, inception, dinov2; got 'vgg'"):
        features.build("vgg")
    with pytest.raises(FileNotFoundError, match=r"dinov2 .* --features-path, or use --features efficientnet_lite0"):
        features.build("dinov2", tmp_path)

    def offline(*_args):
        raise OSError("offline")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(FileNotFoundError, match=r"inception .*inception-2015-12-05.pt\) cannot be had"):
        features.build("inception")
    with pytest.raises(FileNotFoundError, match="check --features-path"):
        features.build("efficientnet_lite0", tmp_path / "none.pth")
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(ValueError, match=r"pip install 'dfm_nb\[metrics\]'"):
        features.build("efficientnet_lite0")
    with pytest.raises(ValueError, match=r"uint8 \[N, H, W, 3\]"):
        features.FeatureNetwork("x", lambda x: x, 8, (0.5,) * 3, (0.5,) * 3)(np.zeros((1, 8, 8), np.uint8))
