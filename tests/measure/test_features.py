"""EfficientNet-Lite0's features order sets of pictures sensibly."""

import sys

import numpy as np
import pytest
import torch
from torch import nn

from dfm_nb.butterflies import synthetic
from dfm_nb.measure import features
from tests.refusals import refused


@pytest.fixture(scope="module")
def efficientnet():
    return features.Features()


def renders(count: int) -> np.ndarray:
    attributes = synthetic.seen_combinations()
    extra = {"species": "monarch", "posture": "open", "motion": "still"}
    wanted = [extra | attributes[i % len(attributes)] for i in range(count)]
    return np.concatenate([synthetic.render(a, i, 64, 64) for i, a in enumerate(wanted)])


def test_efficientnet_features_have_their_size_and_do_not_depend_on_the_batch(efficientnet):
    pictures = renders(3)
    rows = efficientnet(pictures)
    assert rows.shape == (3, 1280) and rows.dtype == np.float32
    np.testing.assert_allclose(efficientnet(pictures[1:2]), rows[1:2], rtol=1e-3, atol=1e-4)
    assert np.abs(rows[0] - rows[1]).max() > 0.1


def test_folding_batch_normalisation_keeps_the_output():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)]
    net, x = nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8)
    for norm in (layers[1], layers[4]):
        for values in (norm.weight.data, norm.running_mean, norm.running_var):
            values.uniform_(0.5, 2)
    expected = net(x)
    torch.testing.assert_close(features._fused(net)(x), expected)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in net)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    refused("metrics", features.Features)
