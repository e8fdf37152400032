"""What a step on CUDA dispatches, counted on the meta device: DiT-XL's 28 layers and parameters' number, narrow."""

import functools
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from dfm_nb.model import adaln, attention, dit
from dfm_nb.model.denoiser import PackInputs
from dfm_nb.parallel import groups, megatron_cpu
from dfm_nb.training import step_graph
from tests.distributed.layouts import make_trainer, randomise

ROWS = adaln.Rows
META = torch.device("meta")
VIEWS = (
    "view t transpose permute expand slice select unsqueeze squeeze split split_with_sizes detach alias empty".split()
)
XL = [
    *"model.num_layers=28 model.hidden_size=64 model.num_attention_heads=4 model.adaln_lora_dim=16".split(),
    *"model.rope=false mixed_precision=bf16 train.global_batch_size=1 dataset.task_encoder_seq_length=256".split(),
    "optimizer.use_distributed_optimizer=false",
]


class Operations(TorchDispatchMode):
    """Counts operations; a copy to the host is a wait, every number that it gives is 1, and one from it an upload."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.shapes: list[tuple[torch.Size, ...]] = []
        self.waits = self.uploads = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation._schema.name.partition("::")[2]
        self.names.append(name)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self.shapes.append(tuple(tensor.shape for tensor in tensors))
        self.uploads += name in ("_to_copy", "copy_") and not all(tensor.is_meta for tensor in tensors)
        waits = name == "_local_scalar_dense" or (name == "_to_copy" and str(kwargs.get("device")) == "cpu")
        if waits and tensors[0].is_meta:
            self.waits += 1
            if name == "_local_scalar_dense":
                return 1.0
            return torch.ones(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        return operation(*args, **kwargs)

    @property
    def kernels(self) -> int:
        return sum(name not in VIEWS for name in self.names)


@torch.library.custom_op("dfm_nb_test::rms_norm", mutates_args=())
def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One kernel, as on CUDA; on meta torch's own is made of several."""
    return x.clone()


@torch.library.custom_op("dfm_nb_test::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return grad.clone(), weight.clone()


rms_norm.register_fake(lambda x, weight: x.new_empty(x.shape))
rms_norm_backward.register_fake(lambda grad, weight: (grad.new_empty(grad.shape), weight.new_empty(weight.shape)))
rms_norm.register_autograd(
    lambda ctx, grad: torch.ops.dfm_nb_test.rms_norm_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


@pytest.fixture
def on_meta(one_rank, monkeypatch):
    """A trainer and a loader for CUDA's code, on tensors without values; nothing is communicated."""
    monkeypatch.setattr(megatron_cpu, "_CPU", META)
    monkeypatch.setattr(groups, "device", lambda: META)
    monkeypatch.setattr("dfm_nb.parallel.device", lambda: META)
    monkeypatch.setattr("dfm_nb.model.build.pick_backend", lambda *_: "varlen")
    functional = {name: getattr(torch.nn.functional, name) for name in ("silu", "gelu", "layer_norm")}
    fused = SimpleNamespace(rms_norm=lambda x, _shape, weight, _eps: rms_norm(x, weight), **functional)
    monkeypatch.setattr(dit, "F", fused)
    trainer, loader = make_trainer(XL)
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, lambda *_args, **_kwargs: None)
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_args, **_kw: None)
    with Operations():
        trainer.step(loader.next_step())  # makes the optimizer's state
    return trainer, loader


def test_a_step_of_the_large_model_is_few_operations_and_one_wait(on_meta):
    trainer, loader = on_meta
    packs = loader.next_step()
    with Operations() as step:
        trainer.step(packs)
    with Operations() as gradients:
        trainer.backward(packs)
    assert len(step.names) <= 6_300, Counter(step.names)
    assert step.kernels <= 3_400, Counter(step.names)
    assert len(step.names) - len(gradients.names) <= 60
    assert (step.waits, gradients.waits) == (1, 0)


def test_packs_of_different_samples_dispatch_the_same_operations_on_the_same_shapes(on_meta):
    trainer, loader = on_meta
    traces = []
    samples = set()
    for _ in range(5):
        packs = loader.next_step()
        samples.add(tuple(packs[0].grids))
        with Operations() as step:
            trainer.step(packs)
        traces.append((step.names, step.shapes))
    assert len(samples) > 1 and traces == traces[:1] * 5


def attention_by_mask(q, k, v, bounds, scale):
    """FlashAttention's packed interface with torch's plain attention."""
    segments = [
        torch.bucketize(torch.arange(len(x)), cu[1:-1], right=True) for x, cu in ((q, bounds[0]), (k, bounds[1]))
    ]
    mask = segments[0][:, None] == segments[1]
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, mask, scale=scale)[0].transpose(0, 1)


def test_a_graphs_region_uploads_nothing_and_never_waits(on_meta):
    trainer, loader = on_meta
    inputs = [PackInputs.of(pack, META, "varlen") for pack in loader.next_step()]
    with Operations() as region:
        trainer._backward_packs(inputs)
    assert region.waits == 0 and region.uploads == 0


def test_steps_by_a_graph_are_those_without(one_rank, monkeypatch):
    """A replay is played by the function that a GPU would have captured: it reads and writes the same tensors."""
    settings = ["optimizer.use_distributed_optimizer=false", "model.cuda_graph=true"]
    replays = []

    def played(run):
        result = run()
        return result, lambda: replays.append(result.copy_(run()))

    monkeypatch.setattr("dfm_nb.model.build.pick_backend", lambda *_: "varlen")
    monkeypatch.setitem(attention.BACKENDS, "varlen", attention_by_mask)
    monkeypatch.setattr(step_graph, "captured", played)

    def losses(graph):
        trainer, loader = make_trainer(settings)
        trainer.why_no_graph = None if graph else "it is compared"
        randomise(trainer)
        shapes = [True, True, True, False, True]  # the fourth step's packs do not fit
        steps = []
        for one_shape in shapes:
            loader.restore(loader.state() | {"one_shape": one_shape})
            steps.append(trainer.step(loader.next_step()))
        assert (trainer.graph is not None) == graph
        return steps, [p.clone() for p in trainer.chunks[0].parameters()]

    by_graph, weights = losses(True)
    eager, plain = losses(False)
    assert by_graph == eager
    assert all(map(torch.equal, weights, plain))
    assert len(replays) == 4


def test_all_layers_are_one_compiled_graph_for_twenty_packs(one_rank, monkeypatch):
    """CUDA's code and packs on the CPU: without a break, and with equal gradients."""
    gathered = lambda _, row, count, dtype: ROWS(row, (row == torch.arange(count)[:, None]).to(dtype), None)  # noqa: E731
    monkeypatch.setattr(dit, "Rows", SimpleNamespace(of=functools.partial(gathered, None)))
    monkeypatch.setitem(attention.BACKENDS, "varlen", attention_by_mask)
    monkeypatch.setattr("dfm_nb.model.build.pick_backend", lambda *_: "varlen")
    trainer, loader = make_trainer(["optimizer.use_distributed_optimizer=false", "model.num_layers=3"])
    randomise(trainer)
    loader.restore(loader.state() | {"one_shape": True})  # as on CUDA
    steps = [loader.next_step() for _ in range(5)]

    def gradients():
        losses = [trainer.backward(packs) for packs in steps]
        return [*losses, *(p.main_grad.clone() for p in trainer.chunks[0].parameters())]

    eager = gradients()
    counter = CompileCounterWithBackend("aot_eager")
    for layer in trainer.chunks[0].decoder.layers:
        layer.compiled = torch.compile(dit.DiTLayer.inner, fullgraph=True, backend=counter)
    for plain, compiled in zip(eager, gradients(), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1 and sum(map(len, steps)) == 20
