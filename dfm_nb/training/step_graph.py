"""Forward and backward of a step as one CUDA graph: the host launches it once instead of thousands of kernels.

The price: a graph's memory, about the activations of the step, stays its own between steps, and its inputs are copied.
Packs of a CUDA run have one shape (`data.order.PackOrder`), so one graph serves them all; others run without it.
"""

from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_leaves

from dfm_nb.model.denoiser import PackInputs

WARM_UP = 3  # runs before the capture, so that compilers and libraries have chosen their kernels


class StepGraph:
    """`run` of some packs, captured, and replayed on others of the same shapes; freed with this object.

    run : a function of packs' inputs whose result is a tensor on their device. It may change other tensors in place,
    the gradients, and must not wait for the device.
    """

    def __init__(self, run: Callable[[Sequence[PackInputs]], torch.Tensor], packs: Sequence[PackInputs]):
        self.tensors, self.shapes = _parts(packs)
        self.result, self.replay = captured(lambda: run(packs))

    def __call__(self, packs: Sequence[PackInputs]) -> torch.Tensor | None:
        """None for packs of other shapes, or with other numbers that kernels take by value, than the captured ones."""
        tensors, shapes = _parts(packs)
        if shapes != self.shapes:
            return None
        for own, other in zip(self.tensors, tensors, strict=True):
            own.copy_(other)
        self.replay()
        return self.result


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """The result of `run`, and what runs it again into the same tensor."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph.replay


def _parts(packs: Sequence[PackInputs]) -> tuple[list[torch.Tensor], list[object]]:
    """Tensors of packs, and what all packs of a graph have in common: their shapes, and what is no tensor."""
    leaves = tree_leaves([(vars(each.part), each[1:]) for each in packs])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return tensors, [leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
