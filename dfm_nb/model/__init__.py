"""The network on megatron-core: DiT, attention, positions, LoRA, EMA, and the EDM denoiser."""

import dfm_nb.parallel  # noqa: F401  # prepares megatron-core before the modules here import it
