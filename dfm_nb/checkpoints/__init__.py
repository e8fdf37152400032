"""Find, verify and load checkpoints, and write them while training continues."""

import dfm_nb.parallel  # noqa: F401  # prepares megatron-core before the modules here import it
