"""Which words of a prompt a model uses: each is left out in turn, and the estimate of the clip is compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from dfm_nb.base.seeds import generator_for
from dfm_nb.generation.clip_files import Generated
from dfm_nb.generation.pipeline import Pipeline

BATCH = 16


def word_effects(
    pipe: Pipeline,
    clip: Generated,
    sigmas: Sequence[float] | None = None,
    num_noises: int = 2,
    check: Callable[[], object] = lambda: None,
) -> list[tuple[str, float]]:
    """How much each word of a clip's prompt moves the model's estimate of that clip, relative to the whole prompt.

    The clip is noised to sigma and denoised with the prompt, with the empty caption, and without each word w:
    |D(prompt) - D(prompt without w)| / |D(prompt) - D("")|, both root mean squares over the latent and the noises.
    The effect is the largest of all sigmas: words of the composition act where the noise hides all of the clip, words
    of patterns where it hides the pattern only. A word near 0 is not used. A word far from 0 is used, but not
    necessarily understood: one that training never showed may well change the clip.

    Parameters
    ----------
    sigmas : None takes 20 and 2 times the model's sigma_data.
    num_noises : number of draws of noise. check : called before each evaluation; what it raises ends the measurement.

    Returns
    -------
    (word, effect) in the order of the prompt, which is cut at spaces.

    Cost: as many packed evaluations of words + 2 segments as noises times sigmas, in batches of at most 16.
    """
    words = clip.request.prompt.split()
    shorter = [" ".join(words[:i] + words[i + 1 :]) for i in range(len(words))]
    texts = [clip.request.prompt, "", *shorter]
    levels = [20 * pipe.sigma_data, 2 * pipe.sigma_data] if sigmas is None else sigmas
    plain = replace(clip.request, guidance=1.0, negative_prompt="", init_image=None, init_video=None)
    clean, squares = clip.latent.double().to(pipe.device), torch.zeros(len(levels), len(texts), dtype=torch.float64)
    noises = [
        torch.randn(clean.shape, generator=generator_for("words", n), dtype=torch.float64) for n in range(num_noises)
    ]
    whole: dict[
        tuple[int, int], torch.Tensor
    ] = {}  # D(prompt) of each level and noise: the first text of the first batch
    for start in range(0, len(texts), BATCH):
        batch = slice(start, start + BATCH)
        denoiser = pipe.denoiser([replace(plain, prompt=text) for text in texts[batch]]).cond
        for (i, sigma), (n, noise) in itertools.product(enumerate(levels), enumerate(noises)):
            check()
            D = denoiser((clean + sigma * noise.to(clean))[None], sigma)
            squares[i, batch] += (D - whole.setdefault((i, n), D[0])).flatten(1).square().sum(1).cpu()
    effects = (squares[:, 2:] / squares[:, 1:2].clamp_min(torch.finfo(torch.float64).tiny)).sqrt().amax(0)
    return list(zip(words, effects.tolist()))
