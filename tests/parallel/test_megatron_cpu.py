"""The CPU support's assumptions about megatron-core; when one moves, the message says what to look at."""

import importlib

import megatron.core
import pytest
import torch

from dfm_nb.parallel import megatron_cpu as _megatron_cpu

HELP = (
    f"megatron-core {megatron.core.__version__} differs from {_megatron_cpu.TESTED_VERSIONS}: "
    "adapt dfm_nb/parallel/megatron_cpu.py"
)


def test_installed_version_is_one_that_was_tested():
    release = megatron.core.__version__.partition("+")[0]  # 0.19 adds the commit of the repository that it is run in
    assert release in _megatron_cpu.TESTED_VERSIONS, HELP


@pytest.mark.parametrize("name", _megatron_cpu.MODULES)
def test_module_that_names_cuda_is_still_there(name):
    module = importlib.import_module(f"megatron.core.{name}")
    assert getattr(module, "torch", None) in (torch, _megatron_cpu.STAND_IN), f"{name} has no global `torch`: {HELP}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for machines without CUDA")
def test_stand_in_answers_for_the_cpu():
    t = _megatron_cpu.STAND_IN
    assert t.cuda.current_device() == torch.device("cpu")
    assert t.zeros(2, device="cuda").device.type == "cpu" and t.full((2,), 3.0, device="cuda:1").tolist() == [3, 3]
    assert t.nn is torch.nn


def test_names_that_the_optimizer_patch_replaces_exist():
    from megatron.core.optimizer import clip_grads, optimizer

    for owner in (clip_grads, optimizer):
        assert hasattr(owner, "clip_grad_by_total_norm_fp32"), f"the function of {owner.__name__} is gone: {HELP}"
