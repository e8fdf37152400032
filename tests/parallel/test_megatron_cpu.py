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
    from megatron.core.optimizer import optimizer

    for name in ("get_grad_norm_fp32", "_multi_tensor_copy_this_to_that"):
        assert hasattr(optimizer, name), f"{name} is gone: {HELP}"
    assert hasattr(optimizer.Float16OptimizerWithFloat16Params, "_get_model_and_main_params_data_float16"), HELP
