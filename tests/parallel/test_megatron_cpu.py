"""The CPU support's assumptions about megatron-core; when one moves, the message says what to look at."""

import megatron.core

from dfm_nb.parallel import megatron_cpu as _megatron_cpu

HELP = (
    f"megatron-core {megatron.core.__version__} differs from {_megatron_cpu.TESTED_VERSIONS}: "
    "adapt dfm_nb/parallel/megatron_cpu.py"
)


def test_installed_version_is_one_that_was_tested():
    release = megatron.core.__version__.partition("+")[0]  # 0.19 adds the commit of the repository that it is run in
    assert release in _megatron_cpu.TESTED_VERSIONS, HELP


def test_names_that_the_optimizer_patch_replaces_exist():
    from megatron.core.optimizer import clip_grads, optimizer

    for owner in (clip_grads, optimizer):
        assert hasattr(owner, "clip_grad_by_total_norm_fp32"), f"the function of {owner.__name__} is gone: {HELP}"
