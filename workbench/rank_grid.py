"""Which rank does what: the processes of a layout as a grid, and their groups along each axis.

The order is megatron-core's tp-cp-dp-pp, tp fastest. Neither torch nor megatron is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dfm_nb.base.markup import Html, fill
from dfm_nb.base.plots import PALETTE

AXES = ("pp", "dp", "cp", "tp")
STYLE = (
    "<style>table.dfm-ranks{border-collapse:separate;margin:0}.dfm-ranks th{font-weight:400}"
    ".dfm-ranks td{border-radius:5px;min-width:7.5em;padding:3px 8px}.dfm-ranks tr *{text-align:center}"
    ".dfm-ranks small{display:block;min-height:1.5em}</style>"
)


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

    def _repr_html_(self) -> Html:
        """One row per copy of each stage, one column per part of a sequence and of a weight, and a legend."""
        group = {axis: next(g for g in self.groups(axis) if self.rank in g) for axis in AXES}
        marks = {rank: axis for axis in AXES for rank in group[axis]} | {self.rank: "this one"}
        cells = [fill('<th scope="col">{}', self._named(cp=c, tp=t)) for c, t in np.ndindex(self.cp, self.tp)]
        for p, d in np.ndindex(self.pp, self.dp):
            cells.append(fill('<tr><th scope="row">{}', self._named(pp=p, dp=d)))
            for rank in self.ranks_PDCT[p, d].ravel():
                node = f"node {rank // self.gpus_per_node}" * (self.world_size > self.gpus_per_node)
                small = " · ".join(filter(None, (node, marks.get(rank))))
                tint, alpha = PALETTE[d % len(PALETTE)], "66" if rank == self.rank else "26" if rank in marks else "00"
                cell = '<td style="border:2px solid {};background:{}">rank {}<small>{}</small>'
                cells.append(fill(cell, tint, tint + alpha, rank, small))
        told = []
        for axis in (axis for axis in reversed(AXES) if len(group[axis]) > 1):
            peers, nodes = group[axis], {rank // self.gpus_per_node for rank in group[axis]}
            peers.remove(self.rank)
            where = f"over {len(nodes)} nodes" if len(nodes) > 1 else "on its node"
            talks = f"rank {self.rank} talks to {', '.join(map(str, peers))}, {where}"
            told.append(fill("<b>{} = {}</b>: {}<br>", axis, len(peers) + 1, talks))
        page = '{}<div style="overflow:auto"><table class="dfm-ranks" aria-label="{}"><th>{}</table></div>{}'
        return fill(page, Html(STYLE), repr(self), cells, told)

    def _named(self, **places: int) -> str:
        """`cp 0 tp 1`, without axes of size 1."""
        return " ".join(f"{axis} {place}" for axis, place in places.items() if getattr(self, axis) > 1)
