"""`import dfm_nb` changes nothing, and after importing megatron-core all can be imported as ever."""

import subprocess
import sys

import pytest
import torch

NO_SIDE_EFFECT = """
import sys, warnings
before = list(sys.meta_path), list(warnings.filters), set(sys.modules)
import dfm_nb
assert list(sys.meta_path) == before[0] and list(warnings.filters) == before[1]
new = {name for name in set(sys.modules) - before[2] if name.partition(".")[0] not in sys.stdlib_module_names}
assert new == {"dfm_nb", "dfm_nb.base", "dfm_nb.base.version"}, new
"""

IMPORT = """
import importlib.metadata, sys, torch
compile_ = torch.compile
import dfm_nb.generation.pipeline
import megatron.core
from dfm_nb.parallel.megatron_cpu import spare_dynamo
assert torch.compile is compile_
spare_dynamo()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=1.0)
weight.sum().backward()
optimizer.step()
assert weight.tolist() == [0, 0], weight
heavy = {"transformers", "pandas", "matplotlib", "multistorageclient", "wandb", "tensorboard"}
if importlib.metadata.version("megatron-core").startswith("0.16."):
    heavy |= {"sympy", "torch.distributed.tensor", "torch._inductor.compile_fx"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import torch._dynamo.config, torch.distributed.checkpoint, torch.distributed.fsdp
assert hasattr(torch.distributed.checkpoint, "save")
assert torch.compile(len, backend="eager")("four") == 4
optimizer.step()
import multistorageclient
from torch.utils.tensorboard import SummaryWriter
from megatron.core.jit import jit_fuser
assert jit_fuser(len)("four") == 4
"""


def run(script):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA they are imported")
def test_pipeline_and_optimizer_do_without_what_is_not_used_here_and_all_is_there_when_it_is_asked_for():
    assert run(IMPORT) == ""


def test_importing_the_package_has_no_side_effect():
    run(NO_SIDE_EFFECT)
