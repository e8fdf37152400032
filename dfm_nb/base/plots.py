"""The loss curve as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from dfm_nb.base.files import replacing
from dfm_nb.base.metrics import series, smooth

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, which people with colour-blindness can tell apart."""


def plot_loss(records: Sequence[Mapping[str, Any]], output: str | Path, title: str = "") -> None:
    """Draw loss against iteration as a PNG: every record faintly, a running mean, and validation points.

    Parameters
    ----------
    records : of one run; without a finite `loss` nothing is drawn. output : the PNG's path.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    x, y = series(records, "loss")
    if not y:
        return
    figure = Figure(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(x, y, color=PALETTE[0], alpha=0.22, linewidth=0.8)
    axes.plot(x, smooth(y, max(1, len(y) // 40)), color=PALETTE[0], linewidth=1.8, label="training loss")
    x_val, y_val = series(records, "val_loss")
    if x_val:
        axes.plot(x_val, y_val, "o", color=PALETTE[1], markersize=4.5, label="validation loss", zorder=3)
    axes.set(xlabel="iteration", ylabel="EDM loss", title=title)
    top = float(np.quantile(y, 0.995))  # a few early spikes are cut off, so that the curve fills the plot
    axes.set_ylim(0 if min(y) < top / 2 else None, 1.05 * top)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False)
    with replacing(output) as temporary:
        figure.savefig(temporary, format="png")
