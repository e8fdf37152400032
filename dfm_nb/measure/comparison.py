"""Samples compared with the data of their captions, and the result of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dfm_nb import display
from dfm_nb.measure import distance
from dfm_nb.measure.results import rows, table
from dfm_nb.measure.retrieval import FEWEST_WAYS, WAYS, retrieval, wrong_passes

if TYPE_CHECKING:
    import pandas as pd


Rows = Sequence[np.ndarray]
"""Features [T, D] of each sample."""


def compare(samples: Rows, asked: Rows, through: Rows, others: Rows = ()) -> dict[str, Any]:
    """Distance of samples to the real ones of their captions, retrieval, and the temporal consistency of clips.

    Each measure has its value, its interval (`low`, `high`) and `real`: the same of the real samples, which is what a
    perfect model would get; in the distance of one half of them to the other, in retrieval `through` the tokenizer.
    There `wrong` is how often another caption's sample passes. Clips count with their middle frames in the distance and
    in retrieval. What too few samples do not tell is left out.
    """
    ours, real, coded, more = ([f[len(f) // 2] for f in clips] for clips in (samples, asked, through, others))
    half, ways = len(real) // 2, min(WAYS, len(real) + len(more))
    found: dict[str, Any] = {}
    if half > 1:  # a distance needs two of each
        within = distance.kernel_distance(np.stack(real[:half]), np.stack(real[half:]))
        estimate = distance.estimate(*distance.paired_kernel_influences(np.stack(ours), np.stack(real)))
        found["kernel_distance"] = asdict(estimate) | {"real": within}
    if ways >= FEWEST_WAYS:
        all_real = np.stack([*real, *more[: max(0, WAYS - len(real))]])
        estimate = retrieval(np.stack(ours), all_real, ways)
        wrong = wrong_passes(estimate.value, len(all_real), ways)
        coded_value = retrieval(np.stack(coded), all_real, ways).value
        found["retrieval"] = asdict(estimate) | {"real": coded_value, "wrong": wrong, "ways": ways}
    if len(samples) > 1 and min(map(len, samples)) > 1:
        consistent, still = ([distance.temporal_consistency(f) for f in clips] for clips in (samples, asked))
        estimate = distance.mean_estimate(np.array(consistent))
        found["temporal_consistency"] = asdict(estimate) | {"real": float(np.mean(still))}
    return found


@dataclass
class EvaluationResult:
    """The result of an evaluation.

    values : by kind (`images`, `clips`), as `dfm evaluate --output` writes it.
    samples : by heading some of the generated ones with their captions; before each the real one of its caption, where
        there is one. uint8 [T, H, W, 3].
    """

    values: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[tuple[list[np.ndarray], str]]] = field(default_factory=dict)

    @property
    def table(self) -> pd.DataFrame:
        """A row for each kind and measure, with its 95 % interval (`low`, `high`); see `evaluation.results.rows`."""
        import pandas as pd

        return pd.DataFrame(rows(self.values))

    def contact_sheet(self) -> np.ndarray:
        """The samples beside the real ones of their captions, uint8 [H, W, 3]."""
        return display.contact_sheet(self.samples, columns=12)

    def __str__(self) -> str:
        """Markdown."""
        return table(self.values)

    __repr__ = _repr_markdown_ = __str__
