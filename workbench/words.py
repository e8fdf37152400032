"""Where in a clip a model's cross attention attends to each word of the prompt."""

import re
from typing import Any

import torch
from einops import rearrange, reduce

from dfm_nb.base.seeds import generator_for
from dfm_nb.generation.clip_files import Generated
from dfm_nb.generation.pipeline import Pipeline
from dfm_nb.generation.request import Request


def word_attention(pipe: Pipeline, clip: Generated, num_noises: int = 4) -> list[tuple[str, torch.Tensor]]:
    """The share of the cross attention that each word of a clip's prompt gets, by layer and place.

    The clip is noised to 2 times the model's sigma_data and denoised. softmax(q k^T / sqrt(d)) is recomputed from each
    layer's q and k, and averaged over heads and noises; a word has the sum of its tokens. The rest, up to 1, goes to
    tokens without a word: start, end, punctuation. A token carries more than its word, because the text encoder has
    read the whole prompt.

    Parameters
    ----------
    num_noises : number of noise draws.

    Returns
    -------
    (word, float32 [layers, T, H, W], in the network's patches) in the order of the prompt.

    Raises
    ------
    ValueError : the text encoder does not map tokens to words.
    """
    prompt = clip.request.prompt
    tokenizer: Any = getattr(pipe.text_encoder, "tokenizer", None)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"the text encoder {pipe.text_encoder.name} does not map tokens to words; minilm and t5 do")
    spans = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    shares: list[torch.Tensor] = []  # float32 [tokens of the clip, tokens of the text] of each layer and noise

    def look(module: Any, args: tuple, out: torch.Tensor) -> None:
        q, k, v = (x.float() for x in args[:3])  # [tokens, heads, d]
        queries = int(args[3].cu_q[1])  # of the first segment, the clip
        keys = int(args[3].cu_kv[1])
        scale = module.scale or q.shape[-1] ** -0.5
        weights = torch.softmax(scale * torch.einsum("shd,lhd->hsl", q[:queries], k[:keys]), -1)
        again = rearrange(weights @ v[:keys].transpose(0, 1), "h s d -> s (h d)")
        theirs = out.flatten(1)[:queries].float()
        assert (again - theirs).norm() < 0.01 * theirs.norm(), "these are not the weights that made the output"
        shares.append(weights.mean(0))

    size = clip.request.model_dump(include={"num_video_frames", "height", "width", "fps"})
    plain = Request(prompt, **size, guidance=1.0)  # nothing is given
    clean = clip.latent.double().to(pipe.device)
    level = 2 * pipe.sigma_data
    denoiser = pipe.denoiser([plain]).cond
    network: Any = pipe.chunks[0]
    layers = network.decoder.layers
    hooks = [layer.cross_attention.core_attention.register_forward_hook(look) for layer in layers]
    try:
        for n in range(num_noises):
            noise = torch.randn(clean.shape, generator=generator_for("words", n), dtype=torch.float64)
            denoiser((clean + level * noise.to(clean))[None], level)
    finally:
        for hook in hooks:
            hook.remove()
    t, h, w = denoiser.grid
    maps = reduce(torch.stack(shares).cpu(), "(n i) (t h w) l -> l i t h w", "mean", n=num_noises, t=t, h=h, w=w)
    attended = []
    for word in re.finditer(r"\w[\w'-]*", prompt):
        total = torch.zeros_like(maps[0])
        for map_of_token, (start, end) in zip(maps, spans):
            if word.start() <= start < end <= word.end():
                total = total + map_of_token
        attended.append((word[0], total))
    return attended
