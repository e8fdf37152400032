"""The table of linear layers against the network itself: parameters on the meta device, FLOPs by torch's counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from dfm_nb.config import ModelConfig, counts, resolve, sizes
from dfm_nb.model.attention import SegmentBounds, cumulative
from dfm_nb.model.dit import DiT, network_class, transformer_config
from dfm_nb.model.linear import freeze_base, is_lora
from dfm_nb.model.pack_slice import PackSlice
from tests.networks import cases

pytestmark = pytest.mark.usefixtures("one_rank")
GIVEN = ["model.in_channels=16", "model.text_dim=4096"]
VARIANTS = [
    [],
    ["model.adaln_lora_dim=16"],
    ["model.qk_layernorm=false", "model.pooled_text=false"],
    ["model.ffn_hidden_size=96", "model.in_channels=8", "model.text_dim=40", "model.patch_temporal=2"],
    *cases("COUNTED", {}).values(),
    ["model.lora.rank=8"],
]


def build(size: str, *overrides: str, device: str = "meta") -> tuple[DiT, ModelConfig]:
    model = resolve(None, overrides=[f"model.size={size}", *GIVEN, *overrides]).config.model
    with torch.device(device):
        return network_class(model)(transformer_config(model, backend="sdpa")), model


@pytest.mark.parametrize(
    "size, extra", [*((size, []) for size in sizes.SIZES), *(("tiny", extra) for extra in VARIANTS[3:])], ids=str
)
def test_parameters_are_those_of_the_network(size, extra):
    network, model = build(size, *extra)
    parameters = dict(network.named_parameters())
    low_rank = sum(p.numel() for name, p in parameters.items() if is_lora(name))
    assert counts.parameter_count(model) == sum(p.numel() for p in parameters.values()) - low_rank
    assert low_rank == counts.lora_parameter_count(model, 8 if "model.lora.rank=8" in extra else 0)
    layer = [p.numel() for name, p in parameters.items() if name.startswith("decoder.layers.0.") and not is_lora(name)]
    assert counts.layer_parameter_count(model) == sum(layer)


@pytest.mark.parametrize("extra", VARIANTS, ids=str)
def test_linear_layers_are_those_of_the_network(extra):
    network, model = build("tiny", *extra)
    table = {x.name: x for x in model.network.outer_linears()}
    for i in range(model.num_layers):
        table |= {f"decoder.layers.{i}.{x.name}": x for x in model.network.layer_linears()}
    weighted = {n: m for n, m in network.named_modules() if getattr(m, "weight", None) is not None}
    modules = {n: m for n, m in weighted.items() if m.weight.dim() == 2}
    assert table.keys() == modules.keys()
    for name, x in table.items():
        module = modules[name]
        assert tuple(module.weight.shape) == (x.fan_out, x.fan_in), name
        assert (module.bias is not None) == x.bias, name
        split = getattr(module.weight, "partition_dim", -1)
        assert split == {"column": 0, "row": 1, None: -1}[x.split], name


CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def cpu_attention_flops(q, k, v, *_args, **_kwargs) -> int:
    """What torch counts for its other attention kernels; for the one on CPU it has no formula."""
    return sdpa_flop_count(q, k, v)


def forward_of_zeros(network: DiT, model: ModelConfig, q_lens: list[int], kv_lens: list[int]) -> torch.Tensor:
    """One forward over a pack without padding."""
    cu_q, cu_kv = cumulative(q_lens), cumulative(kv_lens)
    n, video, text = len(q_lens), cu_q[-1], cu_kv[-1]
    part = PackSlice(
        tokens=slice(video),
        row=torch.arange(n).repeat_interleave(torch.tensor(q_lens)),
        positions=torch.zeros(video, 3),
        text=torch.zeros(text, model.text_dim),
        pool=torch.zeros(n, text),
        fps=torch.ones(n),
        self_bounds=SegmentBounds(cu_q, cu_q),
        cross_bounds=SegmentBounds(cu_q, cu_kv),
        device=torch.device("cpu"),
    )
    return network(torch.zeros(video, model.network.patch_dim), torch.zeros(n), part)


@pytest.mark.parametrize("extra", VARIANTS[:-1], ids=str)
def test_flops_are_those_that_torch_counts(extra):
    network, model = build("tiny", *extra, device="cpu")
    q_lens, kv_lens = [12, 30, 20], [5, 1, 7]  # all different: no keys are padded
    with (
        FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: cpu_attention_flops}) as counter,
        torch.no_grad(),
    ):
        forward_of_zeros(network, model, q_lens, kv_lens)
    pooling = 2 * len(q_lens) * sum(kv_lens) * model.hidden_size if model.pooled_text else 0
    assert counts.forward_flops(model, q_lens, kv_lens) == counter.get_total_flops() - pooling
    assert counts.model_flops(model, q_lens, kv_lens) == 3 * counts.forward_flops(model, q_lens, kv_lens)
    assert counts.attention_flops(model, q_lens, kv_lens) == counter.get_flop_counts()["Global"][CPU_ATTENTION]
    with pytest.raises(ValueError):
        counts.forward_flops(model, [64], [])


def test_flops_of_low_rank_updates_leave_out_gradients_of_frozen_weights():
    """Embedders, which have no backward, and the updates' own products are 1 % of eight layers."""
    network, model = build("tiny", "model.num_layers=8", "model.lora.rank=1", device="cpu")
    freeze_base(network)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    attention = {CPU_ATTENTION: cpu_attention_flops, backward: lambda _, *qkv, **kw: 2 * cpu_attention_flops(*qkv)}
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        forward_of_zeros(network, model, [120, 300], [5, 7]).sum().backward()
    assert counts.model_flops(model, [120, 300], [5, 7]) == pytest.approx(counter.get_total_flops(), rel=0.02)
