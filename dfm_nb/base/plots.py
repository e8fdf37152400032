"""The loss curve as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Sequence

from dfm_nb.base.files import replacing
from dfm_nb.base.metrics import series, smooth

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, which people with colour-blindness can tell apart."""


def plot_loss(
    runs: Mapping[str, Sequence[Mapping[str, Any]]] | Sequence[Mapping[str, Any]], output: str | Path, title: str = ""
) -> Path:
    """Draw loss against iteration as a PNG: every record faintly, a running mean, and validation points.

    Parameters
    ----------
    runs : the records of one run, or {name: records} to lay several over one another.
    output : the PNG's path.

    Raises
    ------
    ValueError : no record has a loss.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    named = runs if isinstance(runs, Mapping) else {"": runs}
    if not any(series(records, "loss")[0] for records in named.values()):
        raise ValueError("there is no loss to draw yet: metrics.jsonl has no record with a finite loss")
    figure = Figure(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, records) in zip(PALETTE * (len(named) // len(PALETTE) + 1), named.items()):
        x, y = series(records, "loss")
        window = max(1, len(y) // 40)
        if window > 1:
            axes.plot(x, y, color=colour, alpha=0.22, linewidth=0.8)
        axes.plot(x, smooth(y, window), color=colour, linewidth=1.8, label=name or "training loss")
        x_val, y_val = series(records, "val_loss")
        if x_val:
            label = f"{name} (validation)" if name else "validation loss"
            axes.plot(
                x_val,
                y_val,
                "o",
                color=PALETTE[1] if not name else colour,
                markersize=4.5,
                label=label,
                markeredgecolor="white",
                markeredgewidth=0.6,
                zorder=3,
            )
    axes.set(xlabel="iteration", ylabel="EDM loss", title=title)
    _limit_height(axes, [v for records in named.values() for v in series(records, "loss")[1]])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    output = Path(output)
    with replacing(output) as temporary:
        figure.savefig(temporary, format="png")
    return output


def _limit_height(axes: Any, values: list[float]) -> None:
    """Cut a few early spikes off so that the curve fills the plot; start at 0 unless that wastes half of it."""
    ranked = sorted(values)
    top = ranked[min(len(ranked) - 1, int(0.995 * len(ranked)))]
    low = ranked[0]
    bottom = 0.0 if low >= 0 and low < top / 2 else low - 0.05 * (top - low)
    if top > bottom:
        axes.set_ylim(bottom, top + 0.06 * (top - bottom))
