"""How much memory generation takes, before it starts: an estimate, and the refusal of what does not fit.

Of the measured growth of a process on CPU (float32, 4,096 and 8,192 tokens) the estimate was 0.98.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from dfm_nb.base import geometry
from dfm_nb.base.memory import GIB
from dfm_nb.base.memory import available_bytes as available_bytes
from dfm_nb.config import counts
from dfm_nb.config.schema import ModelConfig

STATES = 8  # float64 copies of the batch that a sampler and its guidance hold at once


@dataclass(frozen=True)
class Work:
    """One batch of clips on one process: latents [in_channels, t, h, w] each.

    weight_bytes : weights of this process. number_bytes : of one number of an activation, 2 for bf16.
    halves : 2 with guidance, else 1. tp, cp, pp : degrees of tensor, context and pipeline parallelism.
    """

    model: ModelConfig
    weight_bytes: int
    batch: int
    t: int
    h: int
    w: int
    halves: int = 2
    text_tokens: int = 32
    number_bytes: int = 4
    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def clip_tokens(self) -> int:
        return self.t * self.h * self.w // (self.model.patch_temporal * self.model.patch_spatial**2)

    @property
    def tokens(self) -> int:
        """Tokens of the packed sequence."""
        return self.batch * self.halves * self.clip_tokens


@dataclass(frozen=True)
class Memory:
    """Bytes on one process at the fullest moment of a denoiser call."""

    weights: int
    activations: int
    text: int
    state: int

    @property
    def total(self) -> int:
        return self.weights + self.beside_weights

    @property
    def beside_weights(self) -> int:
        return self.activations + self.text + self.state


def estimate(work: Work) -> Memory:
    """Memory of one call of the guided denoiser; nothing is kept for a backward pass."""
    model, e, h = work.model, work.number_bytes, work.model.hidden_size
    local = -(-work.tokens // work.cp)
    # Of a layer at most these are alive: residual, input, normed and modulated input, a float32 form of one of them ...
    activations = local * h * (4 * e + 4)
    # ... and the inside of one branch: q, k, v and the result of attention, or both sides of the MLP's activation.
    widths = counts.inner_widths(model)
    attention = local * widths["self_attention"] // work.tp
    if work.cp > 1:  # gathered keys and values of the whole sequence
        attention += work.tokens * 2 * h // work.tp
    activations += max(attention, local * widths["mlp"] // work.tp) * e
    # Text keys and values stay from the first call on, those of every layer.
    per_text_token = h + model.num_layers // work.pp * counts.text_width(model) // work.tp
    text = work.batch * work.halves * work.text_tokens * per_text_token * e
    values = work.batch * work.clip_tokens * counts.patch_dim(model)
    return Memory(work.weight_bytes, activations, text, values * 8 * STATES)


def refusal(work: Work, room: int | None) -> str:
    """The sentence for a batch that does not fit `room` bytes beside the weights; None: it ran out while sampling."""
    m = estimate(work)
    frames, height, width = geometry.pixel_size(work.t, work.h, work.w)
    parts = ", ".join(f"{name} {part / GIB:.3g}" for name, part in asdict(m).items())
    what = (
        f"{work.batch} clip(s) of {frames} frames at {height}x{width} ({work.clip_tokens} tokens each, "
        f"cp-size {work.cp}): an estimated {m.total / GIB:.3g} GiB per process ({parts})"
    )
    fix = "lower --batch-size, --num-video-frames, or --height and --width, or raise --cp-size with --nproc-per-node"
    if room is None:
        return f"out of memory for {what}; {fix}"
    left = f"{room / GIB:.3g} GiB left beside the weights"
    return f"there is too little memory for {what}, with {left}; {fix}; --no-memory-check skips the estimate"
