"""Which rank does what: the processes of a layout as a grid, and their groups along each axis.

The order is megatron-core's tp-cp-dp-pp, tp fastest. Neither torch nor megatron is imported.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field

import numpy as np

AXES = ("pp", "dp", "cp", "tp")
MEANING = {
    "tp": "tensor: share each weight matrix",
    "cp": "context: share each sequence",
    "dp": "data: different samples, same weights",
    "pp": "pipeline: share the layers",
}
TINTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
TABLE = "border-collapse:separate;border-spacing:4px;margin:0"
HEAD = "font-weight:400;opacity:.75;text-align:center;padding:0 4px"
CELL = "border-radius:5px;min-width:7.5em;padding:3px 8px;text-align:center;font-variant-numeric:tabular-nums"


@dataclass
class RankGrid:
    """A layout of `world_size` processes; dp = world_size / (tp cp pp).

    gpus_per_node : ranks of a node are consecutive. rank : its groups are marked.

    >>> grid = RankGrid(8, tp=2, pp=2)
    >>> grid.dp, grid.where(5), grid.groups("tp")[:2]
    (2, {'pp': 1, 'dp': 0, 'cp': 0, 'tp': 1}, [[0, 1], [2, 3]])
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    gpus_per_node: int = 8
    rank: int = 0
    dp: int = field(init=False)
    ranks_PDCT: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("world_size", "tp", "cp", "pp", "gpus_per_node")}
        if min(given.values()) < 1:
            raise ValueError(f"{', '.join(given)} must be at least 1; got {given}")
        model = self.tp * self.cp * self.pp
        self.dp, rest = divmod(self.world_size, model)
        if rest:
            got = f"got {self.world_size}; use {(self.dp + 1) * model} processes or other degrees"
            raise ValueError(f"tp * cp * pp = {model} must divide the number of processes; {got}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be 0 to {self.world_size - 1}; got {self.rank}")
        # 8 ranks with tp 2 and pp 2: ranks_PDCT[1, 0, 0] is [4, 5], which share the weights of the second stage
        self.ranks_PDCT = np.arange(self.world_size).reshape(self.pp, self.dp, self.cp, self.tp)

    def where(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank."""
        return dict(zip(AXES, map(int, np.unravel_index(rank, self.ranks_PDCT.shape))))

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that communicate along an axis, each group in order."""
        along_last = np.moveaxis(self.ranks_PDCT, AXES.index(axis), -1)
        return sorted(along_last.reshape(-1, getattr(self, axis)).tolist())

    def _peers(self, axis: str) -> list[int]:
        """The ranks that the marked rank communicates with along an axis."""
        return next([r for r in group if r != self.rank] for group in self.groups(axis) if self.rank in group)

    # ---- the drawing ----------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        """One row per copy of each stage, one column per part of a sequence and of a weight, and a legend."""
        columns = list(np.ndindex(self.cp, self.tp))
        heads = "".join(f'<th scope="col" style="{HEAD}">{self._named(cp=c, tp=t)}</th>' for c, t in columns)
        body = f"<tr><td></td>{heads}</tr>"
        for p, d in np.ndindex(self.pp, self.dp):
            cells = "".join(self._cell(int(self.ranks_PDCT[p, d, c, t]), TINTS[d % len(TINTS)]) for c, t in columns)
            body += f'<tr><th scope="row" style="{HEAD}">{self._named(pp=p, dp=d)}</th>{cells}</tr>'
        legend = "".join(f"<li>{self._described(axis)}</li>" for axis in reversed(AXES) if getattr(self, axis) > 1)
        legend = f'<ul style="margin:8px 0">{legend or "<li>a single process</li>"}</ul>'
        said = html.escape(repr(self))
        return f'<div style="overflow:auto"><table aria-label="{said}" style="{TABLE}">{body}</table></div>{legend}'

    def _described(self, axis: str) -> str:
        """An axis, what its ranks do, which ranks the marked one communicates with, and over how many nodes."""
        peers = self._peers(axis)
        nodes = len({r // self.gpus_per_node for r in (self.rank, *peers)})
        where = f"over {nodes} nodes" if nodes > 1 else "on its node"
        return f"<b>{axis} = {getattr(self, axis)}</b>, {MEANING[axis]}; rank {self.rank} talks to {peers}, {where}"

    def _named(self, **places: int) -> str:
        """`cp 0 tp 1`, without axes of size 1."""
        return " ".join(f"{axis} {place}" for axis, place in places.items() if getattr(self, axis) > 1)

    def _cell(self, rank: int, tint: str) -> str:
        """A rank, its node, and the axis along which the marked rank communicates with it."""
        mark = "this one" if rank == self.rank else next((a for a in AXES if rank in self._peers(a)), "")
        node = f"node {rank // self.gpus_per_node}" if self.world_size > self.gpus_per_node else ""
        small = " · ".join(filter(None, (node, mark))) or "&nbsp;"
        filled = f"background:{tint}{'66' if rank == self.rank else '26'};" if mark else ""
        return (
            f'<td style="{filled}border:2px solid {tint};{CELL}">rank {rank}'
            f'<div style="font-size:11px;opacity:.75">{small}</div></td>'
        )
