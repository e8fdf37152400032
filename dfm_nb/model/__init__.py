"""The network on megatron-core: DiT, its attention, positions, low-rank updates, averages of weights, the EDM denoiser."""

import dfm_nb.parallel  # noqa: F401  # prepares megatron-core before the modules here import it
