"""Checkpoints: found, verified, loaded, written beside training."""

import dfm_nb.parallel  # noqa: F401  # prepares megatron-core before the modules here import it
