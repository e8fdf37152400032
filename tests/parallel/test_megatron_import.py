"""megatron-core is imported without what is not used here, and afterwards all can be imported as ever."""

import subprocess
import sys

SCRIPT = """
import sys, torch
compile_ = torch.compile
import dfm_nb, megatron.core
heavy = {n for n in ("multistorageclient", "wandb", "torch._inductor.compile_fx", "tensorboard") if n in sys.modules}
assert not heavy, heavy
assert torch.compile is compile_ and type(megatron.core.__spec__.loader).__name__ == "SourceFileLoader"
import multistorageclient
from torch.utils.tensorboard import SummaryWriter
from megatron.core.jit import jit_fuser
assert jit_fuser(len)("four") == 4
"""


def test_megatron_is_imported_without_what_is_not_used_here():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
