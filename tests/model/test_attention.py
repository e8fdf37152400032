import importlib.util

import pytest
import torch

from dfm_nb.model import attention
from dfm_nb.model.attention import BACKENDS, SegmentBounds, cumulative, deal, pick_backend, sdpa
from tests.refusals import refused

CASES = {
    "equal": ([4, 4, 4], [5, 5, 5]),
    "ragged text": ([4, 4, 4], [3, 7, 5]),
    "mixed": ([3, 3, 8, 1], [2, 6, 6, 9]),
    "padding without text partner": ([6, 0, 2], [4, 3, 1]),
}


def tensors(q_lens, kv_lens):
    g = torch.Generator().manual_seed(0)
    make = lambda n: torch.randn(n, 2, 8, generator=g, dtype=torch.float64, requires_grad=True)  # noqa: E731
    return make(sum(q_lens)), make(sum(kv_lens)), make(sum(kv_lens))


def reference(q, k, v, bounds):
    out = []
    for a, b, c, d in bounds.segments():
        weights = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]).div(8**0.5).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v[c:d]))
    return torch.cat(out)


@pytest.mark.parametrize("backend", [name for name in attention.BACKENDS if name not in attention.NEEDS])
@pytest.mark.parametrize("case", CASES)
def test_a_back_end_equals_the_formula_with_gradients(case, backend):
    q_lens, kv_lens = CASES[case]
    bounds = SegmentBounds(cumulative(q_lens), cumulative(kv_lens))
    q, k, v = tensors(q_lens, kv_lens)
    out, want = BACKENDS[backend](q, k, v, bounds, None), reference(q, k, v, bounds)
    torch.testing.assert_close(out, want)
    probe = torch.randn_like(out)
    for got, expected in zip(torch.autograd.grad(out, (q, k, v), probe), torch.autograd.grad(want, (q, k, v), probe)):
        torch.testing.assert_close(got, expected)


def test_short_segments_are_computed_in_float32_on_cpus():
    short, long = (cumulative([length] * 3) for length in (16, 512))
    assert SegmentBounds(short, short).in_float32
    assert not SegmentBounds(long, short).in_float32
    assert not SegmentBounds(short, short, torch.device("meta")).in_float32


def test_context_parallel_shares_put_together_are_the_whole():
    """Also of a segment with fewer queries than there are ranks."""
    size, q_lens, kv_lens = 3, [3, 3, 8, 1, 1], [2, 6, 6, 9, 4]
    bounds = SegmentBounds(cumulative(q_lens), cumulative(kv_lens))
    q, k, v = tensors(q_lens, kv_lens)
    out = torch.empty_like(q)
    for r in range(size):
        out[deal(r, size)] = sdpa(q[deal(r, size)], k, v, bounds.dealt(r, size), None)
    torch.testing.assert_close(out, reference(q, k, v, bounds))


def test_every_rank_has_the_same_share_of_every_segment():
    size, lengths = 8, [1, 7, 16, 240, 3, 21]
    ranks = [SegmentBounds(cumulative(lengths), cumulative(lengths)).dealt(r, size).cu_q for r in range(size)]
    shares = torch.tensor([[b - a for a, b in zip(cu, cu[1:])] for cu in ranks])
    assert shares.sum(0).tolist() == lengths
    assert (shares.amax(0) - shares.amin(0)).max() <= 1 and len(set(shares.sum(1).tolist())) == 1


def test_backend_choice_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cpu = torch.device("cpu")
    assert pick_backend("auto", cpu) == "sdpa"
    refused("varlen .*CUDA", pick_backend, "varlen", cpu)
    refused("flash_attn .*flash-attn", pick_backend, "flash_attn", torch.device("cuda"))
    assert pick_backend("auto", torch.device("cuda"), "fp32") == "sdpa"
    refused("varlen .*bf16", pick_backend, "varlen", torch.device("cuda"), "fp32")


def test_a_new_backend_runs_where_nothing_is_needed(monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "plain", attention.sdpa)
    assert pick_backend("plain", torch.device("cpu")) == "plain"


@pytest.mark.parametrize("package, generation", [(True, 9), (False, 9), (True, 10)])
def test_flash_attention_3_is_used_on_hopper_where_it_is_installed(monkeypatch, package, generation):
    activated = []
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: package or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (generation, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    attention.use_flash_attention_3(torch.device("cuda"))
    assert activated == (["FA3"] if package and generation == 9 else [])
