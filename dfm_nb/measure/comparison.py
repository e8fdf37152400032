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


def compare(samples: Rows, asked: Rows, through: Rows, others: Rows = ()) -> dict:
    """Distance of samples to the real ones of their captions, retrieval, and the temporal consistency of clips.

    Each measure has its value, its interval (`low`, `high`) and `real`: the same of the real samples, which is what a
    perfect model would get; in the distance of one half of them to the other, in retrieval `through` the tokenizer.
    There `wrong` is how often another caption's sample passes. Clips count with their middle frames in the distance and
    in retrieval. What too few samples do not tell is left out.
    """
    ours = _middle_frames(samples)
    real = _middle_frames(asked)
    half = len(real) // 2
    ways = min(WAYS, len(real) + len(others))
    measures: dict = {}
    if half > 1:  # a distance needs two of each
        estimate = distance.estimate(*distance.paired_kernel_influences(ours, real))
        measures["kernel_distance"] = asdict(estimate) | {
            "real": distance.kernel_estimate(real[:half], real[half:]).value
        }
    if ways >= FEWEST_WAYS:
        all_real = _middle_frames([*asked, *others[: max(0, WAYS - len(real))]])
        estimate = retrieval(ours, all_real, ways)
        measures["retrieval"] = asdict(estimate) | {
            "real": retrieval(_middle_frames(through), all_real, ways).value,
            "wrong": wrong_passes(estimate.value, len(all_real), ways),
            "ways": ways,
        }
    if len(samples) > 1 and min(map(len, samples)) > 1:
        estimate = distance.mean_estimate(_consistencies(samples))
        measures["temporal_consistency"] = asdict(estimate) | {"real": float(_consistencies(asked).mean())}
    return measures


def _middle_frames(clips: Rows) -> np.ndarray:
    return np.stack([features[len(features) // 2] for features in clips])


def _consistencies(clips: Rows) -> np.ndarray:
    return np.array(list(map(distance.temporal_consistency, clips)))


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
        """A row for each kind and measure, with its 95 % interval (`low`, `high`); see `measure.results.rows`."""
        import pandas as pd

        return pd.DataFrame(rows(self.values))

    def contact_sheet(self) -> np.ndarray:
        """The samples beside the real ones of their captions, uint8 [H, W, 3]."""
        return display.contact_sheet(self.samples, columns=12)

    def __str__(self) -> str:
        """Markdown."""
        return table(self.values)

    __repr__ = _repr_markdown_ = __str__
