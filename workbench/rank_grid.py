"""Which rank does what: the processes of a layout as a grid, and their groups along each axis.

The order is megatron-core's tp-cp-dp-pp, tp fastest. Neither torch nor megatron is imported.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from workbench.controls import fault_html
from workbench.live import Live

AXES = ("tp", "cp", "dp", "pp")
MEANING = {
    "tp": "tensor: share each weight matrix",
    "cp": "context: share each sequence",
    "dp": "data: different samples, same weights",
    "pp": "pipeline: share the layers",
}
TINTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")


@dataclass
class RankGrid(Live):
    """A layout of `world_size` processes; dp = world_size / (tp cp pp).

    gpus_per_node : ranks of a node follow one another. rank : whose groups are marked; None for no marks.

    >>> grid = RankGrid(8, tp=2, pp=2)
    >>> grid.dp, grid.where(5), grid.groups("tp")[:2]
    (2, {'tp': 1, 'cp': 0, 'dp': 0, 'pp': 1}, [[0, 1], [2, 3]])
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    gpus_per_node: int = 8
    rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "cp", "pp", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.world_size % self.model_size:
            fits = max(1, round(self.world_size / self.model_size)) * self.model_size
            got = f"got {self.world_size}; take {fits} processes or other degrees"
            raise ValueError(f"tp * cp * pp = {self.model_size} must divide the number of processes; {got}")
        if self.rank is not None and not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be 0 to {self.world_size - 1}; got {self.rank}")
        self._box: Any = None

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

    def kept_html(self) -> str:
        stages = "".join(self._stage(p) for p in range(self.pp))
        used = [a for a in AXES if getattr(self, a) > 1]
        legend = "".join(f"<li>{self._group_of(a)}</li>" for a in used)
        said = html.escape(repr(self), quote=True)
        return (
            f'<div role="group" aria-label="{said}" style="display:flex;flex-wrap:wrap;gap:18px">{stages}</div>'
            f'<ul style="margin:8px 0">{legend or "<li>one process does all</li>"}</ul>'
        )

    def _group_of(self, axis: str) -> str:
        """An axis, what its ranks do, and which they are, on how many nodes."""
        said = f"<b>{axis} = {getattr(self, axis)}</b>, {MEANING[axis]}; "
        if self.rank is None:
            return f"{said}groups {self._shown(axis)}"
        group = next(g for g in self.groups(axis) if self.rank in g)
        nodes = len({r // self.gpus_per_node for r in group})
        return f"{said}rank {self.rank} talks to {[r for r in group if r != self.rank]}" + (
            f", over {nodes} nodes" if nodes > 1 else ", on its node"
        )

    @property
    def widget(self) -> Any:
        """The grid below sliders of its numbers; a layout that cannot be says what would fit."""
        if self._box is None:
            import ipywidgets as w

            from workbench.slider import Slider

            most = max(32, self.world_size)
            ends = {"world_size": most, "tp": 8, "cp": 8, "pp": 8, "gpus_per_node": 16, "rank": most - 1}
            self._sliders = {
                name: Slider(
                    label="GPUs" if name == "world_size" else name.replace("gpus_per_node", "per node"),
                    value=getattr(self, name) or 0,
                    min=0 if name == "rank" else 1,
                    max=max(end, getattr(self, name) or 0),
                    step=1,
                )
                for name, end in ends.items()
            }
            for slider in self._sliders.values():
                slider.observe(lambda _change: self._moved(), names="value")
            self._drawn, half = w.HTML(), w.Layout(flex="1 1 22em", overflow="visible")
            rows = list(self._sliders.values())
            flow = w.Layout(flex_flow="row wrap", overflow="visible")
            sliders = w.HBox([w.VBox(rows[:3], layout=half), w.VBox(rows[3:], layout=half)], layout=flow)
            self._box = w.VBox([sliders, self._drawn])
            self._moved()
        return self._box

    def _moved(self) -> None:
        asked = {name: int(slider.value) for name, slider in self._sliders.items()}
        rank = min(asked.pop("rank"), asked["world_size"] - 1)
        try:
            now = RankGrid(**asked, rank=rank)
        except ValueError as error:
            self._drawn.value = fault_html(str(error))
            return
        for name in ("world_size", "tp", "cp", "pp", "gpus_per_node", "rank"):
            setattr(self, name, getattr(now, name))
        self._drawn.value = now.kept_html()
        self.keep()

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
        tint, mark = TINTS[d % len(TINTS)], self._mark(rank)
        node = f"node {rank // self.gpus_per_node}" if self.world_size > self.gpus_per_node else ""
        small = " · ".join(part for part in (node, mark) if part)
        filled = f";background:{tint}{'66' if rank == self.rank else '26'}" if mark else ""
        return (
            f'<td style="border:2px solid {tint};border-radius:5px;min-width:7.5em;padding:3px 8px;text-align:center;'
            f'font-variant-numeric:tabular-nums{filled}">rank {rank}<div style="font-size:11px;opacity:.75">'
            f"{small or '&nbsp;'}</div></td>"
        )

    def _mark(self, rank: int) -> str:
        """`this one`, the axis along which a rank talks to the marked one, or nothing."""
        if self.rank is None:
            return ""
        here, marked = self.where(rank), self.where(self.rank)
        differ = [a for a in AXES if here[a] != marked[a]]
        return "this one" if not differ else differ[0] if len(differ) == 1 else ""


_HEAD = "font-weight:400;opacity:.75;text-align:center;padding:0 4px"
