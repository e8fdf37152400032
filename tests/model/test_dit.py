from dataclasses import fields, replace

import pytest
import torch

from dfm_nb import config as cfg
from dfm_nb.config import counts, networks
from dfm_nb.config.schema import marked
from dfm_nb.data.stores import MockStore
from dfm_nb.diffusion.objective import EDM
from dfm_nb.model.build import build_chunks
from dfm_nb.model.denoiser import forward
from dfm_nb.model.dit import DiTConfig, _Rotate, rotary_table
from dfm_nb.packs.packer import PackShape
from dfm_nb.packs.packs import PackSettings, draw_sample, pack_draws
from tests import tiny_run
from tests.refusals import refused

SETTINGS = PackSettings(cfg.resolve(None, overrides=["train.caption_dropout=0"]).config)
SMALL = [*tiny_run.NETWORK, "model.num_layers=2", "model.in_channels=4", "model.text_dim=6"]


def model_config(*overrides):
    return cfg.resolve(None, overrides=[*SMALL, *overrides]).config.model


def make(*overrides, random=True):
    _, (chunk,) = build_chunks(model_config(*overrides), "fp32", seed=1)
    if random:
        with torch.no_grad():
            g = torch.Generator().manual_seed(0)
            for p in chunk.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * 0.1 + (p.dim() == 1))
    return chunk


def draws(count=5):
    store = MockStore([(1, 8, 8), (3, 4, 8), (1, 6, 4)], text_tokens=5, channels=4, text_dim=6)
    settings = replace(SETTINGS, statistics=store.statistics)
    return [draw_sample(store.read(i), 0, settings, store.empty_text) for i in range(count)]


def outputs(chunk, pack):
    with torch.no_grad():
        out, _ = forward(chunk, pack, EDM(0.5), torch.device("cpu"))
    return {key: out[pack.cu_q[i] : pack.cu_q[i + 1]] for i, key in enumerate(pack.keys)}


MARKED = {k.removeprefix("model.") for k in marked("network") if k.startswith("model.")}
NETWORK = sorted({f.name for f in fields(DiTConfig)} & MARKED)
ELSEWHERE = set(
    "size student variant patch_spatial patch_temporal text_padding sigma_data P_mean P_std objective times".split()
)
ELSEWHERE |= {"times", "shift_tokens", "lora.rank", "lora.alpha"}


def test_each_setting_of_the_network_is_a_field_of_its_config_or_read_elsewhere():
    """A key that fails here needs a field of the same name in `DiTConfig`."""
    assert MARKED - set(NETWORK) == ELSEWHERE


@pytest.mark.parametrize("key", NETWORK)
def test_a_setting_that_changes_the_weights_is_one_that_must_equal_theirs(one_rank, key):
    """Else a resumed run would drop or lack weights without a word."""
    value = getattr(model_config(), key)
    other = str(not value).lower() if isinstance(value, bool) else 2 * (value or 4)

    def weights(*overrides):
        return {name: p.shape for name, p in make(*overrides, random=False).named_parameters()}

    assert weights() == weights(f"model.{key}={other}") or f"model.{key}" in marked("shape")


@pytest.mark.parametrize("name", NETWORK)
@pytest.mark.parametrize("variant", networks.names())
def test_a_setting_changes_the_network_or_is_refused(one_rank, variant, name):
    """A key that fails here is not read by this network, which must fix it (`Network.settings`).

    What it changed is in use: every weight gets a gradient, and is counted.
    """
    rope = networks.find(variant).settings.get("rope", True)  # without it, its backward changes nothing
    base = [f"model.variant={variant}", f"model.rope={str(rope).lower()}", "model.hidden_size=256"]
    before, held = make(*base), getattr(model_config(*base), name)
    other = not held if isinstance(held, bool) else 2 * (held or 8)
    try:
        base.append(f"model.{name}={str(other).lower()}")
        after = make(*base)
    except cfg.ConfigError as error:
        assert [f.key for f in error.faults] == [f"model.{name}"]
        return
    shapes = [{n: p.shape for n, p in chunk.named_parameters()} for chunk in (before, after)]
    pack = pack_draws(draws(1), SETTINGS)
    assert shapes[0] != shapes[1] or not torch.equal(*(outputs(c, pack)["mock000000"] for c in (before, after)))
    forward(after, pack, EDM(0.5), torch.device("cpu"))[0].sum().backward()
    assert [n for n, p in after.named_parameters() if p.grad is None] == []
    assert counts.parameter_count(model_config(*base)) == sum(p.numel() for p in after.parameters())


def test_a_network_that_counts_other_parameters_is_refused(one_rank, monkeypatch):
    monkeypatch.setattr(networks.Network, "outer_vectors", lambda self, last: 0)
    refused("model.variant=dit", make)


def test_new_model_gives_zero(one_rank):
    out, loss_of = forward(make(random=False), pack_draws(draws(), SETTINGS), EDM(0.5), torch.device("cpu"))
    assert not out.any()
    loss = loss_of(out).loss
    assert 0.7 < loss.mean() < 1.4  # the effective target has unit variance (EDM, section 5)


@pytest.mark.parametrize("rope", ["false", "true"])
def test_sample_does_not_depend_on_its_company(one_rank, rope):
    chunk, some = make(f"model.rope={rope}"), draws()
    one_shape = replace(SETTINGS, shape=PackShape(text=64, rows=16, segments=12, longest=200))
    together = outputs(chunk, pack_draws(some, one_shape, capacity=200))
    for d in some:
        alone = outputs(chunk, pack_draws([d], SETTINGS))
        torch.testing.assert_close(together[d.key], alone[d.key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["sigma", "fps", "text"])
def test_conditioning_reaches_its_own_sample_only(one_rank, change):
    chunk, some = make(), draws(3)
    before = outputs(chunk, pack_draws(some, SETTINGS))
    d = some[1]
    row = d.rows[0]._replace(**{"sigma": {"sigma": 50.0}, "fps": {"fps": 7.0}}.get(change, {}))
    some[1] = replace(d, rows=[row], text=-d.text if change == "text" else d.text)
    after = outputs(chunk, pack_draws(some, SETTINGS))
    assert not torch.allclose(before[d.key], after[d.key], atol=1e-3)
    for other in (some[0].key, some[2].key):
        torch.testing.assert_close(before[other], after[other], rtol=1e-4, atol=1e-5)


def test_cached_text_keys_give_the_same_output(one_rank):
    from dfm_nb.model.denoiser import PackDenoiser

    chunk, pack = make(), pack_draws(draws(), SETTINGS)
    x = torch.randn(pack.x0.shape, dtype=torch.float64)
    cached = PackDenoiser([chunk], pack, EDM(0.5), torch.device("cpu"))
    plain = PackDenoiser([chunk], pack, EDM(0.5), torch.device("cpu"))
    plain.part.text_cache = None
    for sigma in (5.0, 0.7):
        torch.testing.assert_close(cached(x, sigma), plain(x, sigma))
    assert len(cached.part.text_cache) == 2


def test_weights_are_a_function_of_seed_and_name(one_rank):
    a, b = make(random=False).state_dict(), make(random=False).state_dict()
    values = [k for k, v in a.items() if isinstance(v, torch.Tensor)]
    assert len(values) > 40 and all(torch.equal(a[k], b[k]) for k in values)
    _, (other,) = build_chunks(model_config(), "fp32", seed=2)
    assert not torch.equal(a["x_embedder.weight"], other.state_dict()["x_embedder.weight"])


def test_rotation_is_torchs_complex_product():
    x = torch.randn(7, 3, 8, dtype=torch.float32, requires_grad=True)
    angles = torch.randn(7, 4)
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    want = torch.cat((pairs.real, pairs.imag), -1)
    got = _Rotate.apply(x, *rotary_table(angles, heads=3))
    torch.testing.assert_close(got, want)
    weights = torch.randn_like(x)
    ours, theirs = (torch.autograd.grad((out * weights).sum(), x)[0] for out in (got, want))
    torch.testing.assert_close(ours, theirs)


def test_rms_norm_on_cpu_is_torchs():
    from dfm_nb.model.dit import _RMSNormOnCPU

    torch.manual_seed(0)
    x, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((5, 3, 8), (8,)))
    ours, theirs = _RMSNormOnCPU.apply(x, w, 1e-6), torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x, w: _RMSNormOnCPU.apply(x, w, 1e-6), (x, w))
    zero = torch.zeros(2, 8, requires_grad=True)
    _RMSNormOnCPU.apply(zero, torch.ones(8), 1e-6).sum().backward()
    assert zero.grad.isfinite().all()
