"""A run of training: the loop, the trainer, optimizers, watchdog, report."""

import dfm_nb.parallel  # noqa: F401  # prepares megatron-core before the modules here import it
