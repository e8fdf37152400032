"""Memory of a forward on one process, without the weights.

The denoiser's estimate was 0.98 of a process's measured growth on CPU (float32, 4,096 and 8,192 tokens).
"""

from collections.abc import Sequence

from dfm_nb.config import counts
from dfm_nb.config.schema import ModelConfig

TEXT_TOKENS = 32
"""Text tokens of a prompt: two sentences."""
STATES = 8
"""float64 copies of the batch that a sampler and its guidance hold at once."""


def clip_tokens(model: ModelConfig, *grids: tuple[int, int, int]) -> int:
    """Tokens of latents [T, H, W]: of a clip, and of what is given with it."""
    ps = model.patch_spatial
    pt = model.patch_temporal
    return sum(-(-t // pt) * (h // ps) * (w // ps) for t, h, w in grids)


def sampling_bytes(
    model: ModelConfig,
    clips: int,
    grids: Sequence[tuple[int, int, int]],
    halves: int = 2,
    text_tokens: int = TEXT_TOKENS,
    bytes_per_number: int = 4,
) -> dict[str, int]:
    """Bytes of one call of the guided denoiser, by owner; nothing is kept for a backward pass.

    Parameters
    ----------
    model : with the degrees of its layout. clips : number in the batch, of `grids` (`clip_tokens`) each.
    halves : 2 with guidance, otherwise 1.
    """
    tp = model.tensor_model_parallel_size
    cp = model.context_parallel_size
    layers = model.num_layers // model.pipeline_model_parallel_size
    e = bytes_per_number
    h = model.hidden_size
    each = clip_tokens(model, *grids)
    tokens = clips * halves * each
    local = -(-tokens // cp)
    # Live tensors of a layer at most: residual, input, normed and modulated input, a float32 copy of one of them ...
    activations = local * h * (4 * e + 4)
    # ... and the inside of one branch: q, k, v and the result of attention, or both sides of the MLP's activation.
    widths = counts.inner_widths(model)
    attention = local * widths["self_attention"] // tp
    if cp > 1:  # gathered keys and values of the complete sequence
        attention += tokens * 2 * h // tp
    activations += max(attention, local * widths["mlp"] // tp) * e
    # Every layer's text keys and values are kept after the first call.
    per_text_token = h + layers * counts.text_width(model) // tp
    text = clips * halves * text_tokens * per_text_token * e
    return {"activations": activations, "text": text, "state": clips * each * model.network.patch_dim * 8 * STATES}
