"""Samples compared with the data of their captions: distances, copies of training samples, and the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dfm_nb.base import video
from dfm_nb.evaluation import distance, diversity, features, reference
from dfm_nb.evaluation.reference import Real
from dfm_nb.evaluation.results import rows, table
from dfm_nb.evaluation.retrieval import WAYS, retrieval, wrong_passes

if TYPE_CHECKING:
    import pandas as pd

MOST_STORED = 20_000
"""Latents of a split that copies are looked for in."""


def against(
    real: Sequence[Real],
    generate: Callable[[Sequence[Real]], list[Any]],
    network: features.Features,
    judged: Callable[[list[np.ndarray], list[dict[str, str]]], dict[str, Any]],
    round_trip: Callable[[np.ndarray], np.ndarray],
) -> tuple[dict[str, Any], list[Any]]:
    """Distances to real samples of one kind, and the generated ones.

    The captions of one half of the real samples are sampled, and distances are to the other half. Of fewer than four,
    all captions are sampled and nothing is compared.

    Parameters
    ----------
    generate : a sample (with `frames`, uint8 [T, H, W, 3]) for each of these, with its caption, size, length and rate.
    judged : what a judge finds of the attributes asked for in videos.
    round_trip : a video through the model's tokenizer.
    """
    half = len(real) // 2 if len(real) >= 4 else len(real)  # a distance needs two of each
    asked, others = real[:half], real[half:]
    samples = generate(asked)
    videos = [s.frames for s in samples]
    found: dict[str, Any] = {"samples": len(videos), "real_samples": len(others), "network": features.NAME}
    found |= judged(videos, [r.attributes for r in asked])
    if not others:
        return found, samples
    sets = (videos, *([r.frames for r in some] for some in (asked, others)), [round_trip(r.frames) for r in asked])
    return found | compare(*([network(v) for v in some] for some in sets)), samples


Rows = Sequence[np.ndarray]
"""Features [T, D] of each sample."""


def compare(samples: Rows, asked: Rows, others: Rows, through: Rows) -> dict[str, Any]:
    """Distance of samples to other real samples, retrieval by caption, and the temporal consistency of clips.

    Each measure has its value, its interval (`low`, `high`) and `real`: the same of the real samples whose captions
    were asked for, which is what a perfect model would get; in retrieval `through` the tokenizer. There `wrong` is how
    often another caption's sample passes. Clips count with their middle frames in the distance and in retrieval.

    Parameters
    ----------
    asked, others : disjoint and real.
    """
    sets = (samples, asked, others, through)
    ours, same, other, coded = (np.stack([f[len(f) // 2] for f in clips]) for clips in sets)
    measures = {"kernel_distance": (distance.kernel_estimate(ours, other), distance.kernel_distance(same, other))}
    if len(ours) >= WAYS:
        measures["retrieval"] = retrieval(ours, same), retrieval(coded, same).value
    if min(map(len, samples)) > 1:
        consistent, real = ([distance.temporal_consistency(f) for f in clips] for clips in (samples, asked))
        measures["temporal_consistency"] = distance.mean_estimate(np.array(consistent)), float(np.mean(real))
    found = {name: {**asdict(estimate), "real": real} for name, (estimate, real) in measures.items()}
    if "retrieval" in found:
        found["retrieval"]["wrong"] = wrong_passes(found["retrieval"]["value"], len(ours))
    return found


def copies(
    samples: Sequence[Any], folder: str, split: str, to_model: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """How many samples of the commonest size are nearer to a training sample than held-out ones (of `split`) are.

    samples : with a `latent` [C, T, H, W] each. to_model : a stored latent as the model has it. {} where there are not
    two latents of training and two held-out ones of that size.
    """
    grid, _ = Counter(tuple(s.latent.shape[1:]) for s in samples).most_common(1)[0]
    ours = torch.stack([s.latent for s in samples if tuple(s.latent.shape[1:]) == grid]).float().cpu()
    held_out, train = (
        [to_model(x).flatten().numpy() for x in reference.stored_latents(folder, name, grid, MOST_STORED)]
        for name in (split, "train")
    )
    if min(len(train), len(held_out)) < 2:
        return {}
    share = diversity.memorised(ours.flatten(1).numpy(), np.stack(held_out), np.stack(train))
    found = {"share": share, "samples": len(ours), "training_samples": len(train), "held_out": len(held_out)}
    return {"memorised": found}


@dataclass
class EvaluationResult:
    """The result of an evaluation.

    values : by kind (`images`, `clips`), as `dfm evaluate --output` writes it.
    samples : some of the generated ones, uint8 [T, H, W, 3], with their captions.
    """

    values: dict[str, Any] = field(default_factory=dict)
    samples: list[tuple[np.ndarray, str]] = field(default_factory=list)

    @property
    def table(self) -> pd.DataFrame:
        """A row for each kind and measure, with its 95 % interval (`low`, `high`); see `evaluation.results.rows`."""
        import pandas as pd

        return pd.DataFrame(rows(self.values))

    def contact_sheet(self) -> np.ndarray:
        """uint8 [H, W, 3]."""
        return video.contact_sheet({"": [([frames], caption) for frames, caption in self.samples]})

    def __str__(self) -> str:
        """Markdown."""
        return table(self.values)

    __repr__ = _repr_markdown_ = __str__
