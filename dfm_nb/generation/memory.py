"""How much memory sampling takes, before it starts: an estimate, what is there, and what to change when it is too much.

Enters: the model's sizes, the layout and the size of a batch. Leaves: `SamplingMemory` in bytes per process; one sentence with the fix.
Guarantees: pure but for `available_bytes`; grows with every one of frames, sides, batch and guidance, falls with cp and tp.
Cost: none. Of the measured growth of a process on CPU (float32, 4,096 and 8,192 tokens) the estimate was 0.98
(tests/test_sampling_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

GIB = 1 << 30
STATES = 8  # float64 copies of the batch that a sampler and its guidance hold at once


@dataclass(frozen=True)
class Work:
    """One batch: clips of latent [channels, t, h, w] in patches of `patch` values; `halves` 2 with guidance, else 1."""

    batch: int
    t: int
    h: int
    w: int
    halves: int = 2
    text_tokens: int = 32
    channels: int = 16
    patch_spatial: int = 2
    patch_temporal: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of the packed sequence."""
        per_clip = self.t * self.h * self.w // (self.patch_temporal * self.patch_spatial**2)
        return self.batch * self.halves * per_clip


@dataclass(frozen=True)
class Sizes:
    """What of the model counts, per process; `number_bytes` of an activation, 2 for bf16."""

    weight_bytes: int
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    number_bytes: int = 4
    tp: int = 1
    cp: int = 1


@dataclass(frozen=True)
class SamplingMemory:
    """Bytes on one process at the fullest moment of a denoiser call, weights included."""

    weights: int
    activations: int
    text: int
    state: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.text + self.state

    @property
    def beside_weights(self) -> int:
        return self.total - self.weights


def estimate(sizes: Sizes, work: Work) -> SamplingMemory:
    """Memory of one call of the guided denoiser.

    Notes
    -----
    A layer holds at most: residual, input, normed and modulated input, a float32 form, and either q, k, v and the attention's output (with
    context parallelism also all keys and values) or the MLP before and after its activation. Nothing is kept for a backward pass.
    """
    h, f, e, tokens = sizes.hidden_size, sizes.ffn_hidden_size, sizes.number_bytes, work.tokens
    local = -(-tokens // sizes.cp)
    attention = local * 4 * h // sizes.tp + (tokens * 2 * h // sizes.tp if sizes.cp > 1 else 0)
    mlp = local * 2 * f // sizes.tp
    activations = local * h * (4 * e + 4) + max(attention, mlp) * e
    text = work.batch * work.halves * work.text_tokens * (h + sizes.num_layers * 2 * h // sizes.tp) * e
    values = work.batch * work.channels * work.t * work.h * work.w
    return SamplingMemory(sizes.weight_bytes, activations, text, values * 8 * STATES)


def available_bytes(device: torch.device) -> int:
    """What this process can still take: of the GPU, or of the machine and its control group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    free, group = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(kept.get("inactive_file", 0)))
    except (OSError, ValueError):  # no control group, or no limit ("max")
        pass
    return free


def advice(sizes: Sizes, work: Work, room: int) -> str:
    """What to change, any one of: batch, frames, sides or cp-size, each to the largest that fits `room` bytes beside the weights."""

    def fits(s: Sizes = sizes, **changes) -> bool:
        return estimate(s, replace(work, **changes)).beside_weights <= room

    def tenths(side: int, k: int) -> int:
        return max(2, side * k // 10 // 2 * 2)  # latent pixels, so that px stay divisible by 16

    out = []
    if (batch := next((b for b in range(work.batch - 1, 0, -1) if fits(batch=b)), None)) is not None:
        out.append(f"lower --batch-size from {work.batch} to {batch}")
    if (t := next((t for t in range(work.t - 1, 0, -1) if fits(t=t)), None)) is not None:
        out.append(f"lower --num-video-frames from {4 * work.t - 3} to {4 * t - 3}")
    smaller = ((tenths(work.h, k), tenths(work.w, k)) for k in range(9, 0, -1))
    if (size := next(((h, w) for h, w in smaller if h * w < work.h * work.w and fits(h=h, w=w)), None)) is not None:
        out.append(f"lower --height and --width from {8 * work.h} and {8 * work.w} to {8 * size[0]} and {8 * size[1]}")
    more = (sizes.cp * 2**k for k in range(1, 9))
    cp = next((c for c in more if fits(replace(sizes, cp=c))), None)
    if cp is not None:
        out.append(f"raise --cp-size from {sizes.cp} to {cp} (with --nproc-per-node {cp * sizes.tp})")
    text = ", or ".join(out) or "lower --batch-size, --num-video-frames, --height and --width together"
    if cp is None:
        shared = estimate(replace(sizes, cp=8 * sizes.cp), work).total / GIB
        text += f" (--cp-size {8 * sizes.cp} alone would take it to {shared:.3g} GiB)"
    return text


def refusal(sizes: Sizes, work: Work, room: int, begun: bool) -> str:
    """The sentence for a batch that does not fit. begun : memory ran out while drawing, so what is asked for must shrink by half."""
    m = estimate(sizes, work)
    if begun:
        room = min(room, m.beside_weights // 2)
    parts = (("weights", m.weights), ("activations", m.activations), ("text", m.text), ("state", m.state))
    said = ", ".join(f"{name} {part / GIB:.3g}" for name, part in parts)
    each = work.tokens // work.batch // work.halves
    what = (
        f"{work.batch} clip(s) of {4 * work.t - 3} frames at {8 * work.h}x{8 * work.w} ({each} tokens each, cp-size {sizes.cp}): an estimated "
        f"{m.total / GIB:.3g} GiB per process ({said})"
    )
    if begun:
        return f"out of memory for {what}; {advice(sizes, work, room)}"
    return (
        f"there is too little memory for {what}, with {room / GIB:.3g} GiB left beside the weights; {advice(sizes, work, room)}; "
        "--no-memory-check draws all the same"
    )
