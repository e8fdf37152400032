"""Which rank does what: the processes of a layout as a grid, and their groups along each axis.

The order is megatron-core's tp-cp-dp-pp, tp fastest. Neither torch nor megatron is imported.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

AXES = ("tp", "cp", "dp", "pp")
MEANING = {
    "tp": "tensor: share each weight matrix",
    "cp": "context: share each sequence",
    "dp": "data: different samples, same weights",
    "pp": "pipeline: share the layers",
}
TINTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


@dataclass(frozen=True)
class RankGrid:
    """A layout of `world_size` processes; dp = world_size / (tp cp pp).

    >>> grid = RankGrid(8, tp=2, pp=2)
    >>> grid.dp, grid.where(5), grid.groups("tp")[:2]
    (2, {'tp': 1, 'cp': 0, 'dp': 0, 'pp': 1}, [[0, 1], [2, 3]])
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "cp", "pp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.world_size % self.model_size:
            fits = max(1, round(self.world_size / self.model_size)) * self.model_size
            raise ValueError(
                f"tp * cp * pp = {self.tp} * {self.cp} * {self.pp} = {self.model_size} must divide the number of "
                f"processes; got {self.world_size}; take {fits} processes or other degrees"
            )

    @property
    def model_size(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """Copies of the model."""
        return self.world_size // self.model_size

    def where(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank."""
        out = {}
        for axis in AXES:
            rank, out[axis] = divmod(rank, getattr(self, axis))
        return out

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that communicate along an axis, each group in order."""
        if axis not in AXES:
            raise ValueError(f"an axis is one of {', '.join(AXES)}; got {axis!r}")
        found: dict[tuple, list[int]] = {}
        for rank in range(self.world_size):
            at = self.where(rank)
            found.setdefault(tuple(at[a] for a in AXES if a != axis), []).append(rank)
        return sorted(found.values())

    # ---- the drawing ----------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        stages = "".join(self._stage(p) for p in range(self.pp))
        used = [a for a in AXES if getattr(self, a) > 1]
        legend = "".join(
            f"<li><b>{a} = {getattr(self, a)}</b>, {MEANING[a]}; groups {self._shown(a)}</li>" for a in used
        )
        said = html.escape(repr(self), quote=True)
        return (
            f'<div role="group" aria-label="{said}" style="display:flex;flex-wrap:wrap;gap:18px">{stages}</div>'
            f'<ul style="margin:8px 0">{legend or "<li>one process does all</li>"}</ul>'
        )

    def _shown(self, axis: str, most: int = 4) -> str:
        groups = self.groups(axis)
        more = f", ... ({len(groups)} in all)" if len(groups) > most else ""
        return ", ".join(str(g) for g in groups[:most]) + more

    def _stage(self, p: int) -> str:
        """One pipeline stage: a row for each copy, a column for each part of a sequence and of a weight."""
        columns = [(c, t) for c in range(self.cp) for t in range(self.tp)]
        head = "".join(f'<th scope="col" style="{_HEAD}">{self._column(c, t)}</th>' for c, t in columns)
        rows = ""
        for d in range(self.dp):
            cells = "".join(self._cell(t, c, d, p) for c, t in columns)
            rows += f'<tr><th scope="row" style="{_HEAD}">{f"dp {d}" if self.dp > 1 else ""}</th>{cells}</tr>'
        title = f"stage {p} of {self.pp}" if self.pp > 1 else "all layers"
        caption = f'<caption style="font-weight:600;text-align:left;padding:2px 0">{title}</caption>'
        table = '<table style="border-collapse:separate;border-spacing:4px;margin:0">'
        return f"{table}{caption}<tr><td></td>{head}</tr>{rows}</table>"

    def _column(self, c: int, t: int) -> str:
        return " ".join(f"{n} {v}" for n, v, degree in (("cp", c, self.cp), ("tp", t, self.tp)) if degree > 1)

    def _cell(self, t: int, c: int, d: int, p: int) -> str:
        rank = t + self.tp * (c + self.cp * (d + self.dp * p))
        tint = TINTS[d % len(TINTS)]
        return (
            f'<td style="border:2px solid {tint};border-radius:5px;min-width:3em;padding:5px 8px;text-align:center;'
            f'font-variant-numeric:tabular-nums">rank {rank}</td>'
        )


_HEAD = "font-weight:400;opacity:.75;text-align:center;padding:0 4px"
