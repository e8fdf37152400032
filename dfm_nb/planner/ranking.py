"""Valid layouts of a model, ranked by step time, and the cost of one training run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dfm_nb import config as cfg
from dfm_nb.base.machine import GIB
from dfm_nb.base.markup import fill
from dfm_nb.config import checks, counts, sizes
from dfm_nb.planner.layouts import GpuLayout, Load, layouts
from dfm_nb.planner.step_cost import Machine, step_seconds, training_bytes

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 0.15
"""Share of a layout's memory to leave free in addition, for CUDA, NCCL and fragmentation."""
SHOWN = 12
"""Number of layouts in the table."""
LAST_HEADS = ("step, s", "communication", "bubble")
COLOURS = {"parameters": "#0072B2", "gradients": "#D55E00", "optimizer": "#009E73", "activations": "#B0578B"}
KEY = '<span style="margin-right:1em"><span style="color:{}">■</span> {}</span>'
ROW = "<tr>{}</tr>"
CELL = '<td style="text-align:left;white-space:nowrap">{}</td>'
BAR = (
    '<div style="display:flex;align-items:center;gap:6px"><div style="position:relative;display:flex;width:200px;'
    'height:12px;background:#8883">{}<div style="position:absolute;left:{};top:-3px;height:18px;border-left:2px solid">'
    "</div></div>{}</div>"
)
PART = '<div style="width:{};background:{}"></div>'


def fed(resolved: cfg.Resolved) -> cfg.Config:
    """The settings, with typical values of a data set if there is none yet."""
    usual = {"model.in_channels": sizes.LATENT_CHANNELS, "model.text_dim": sizes.TEXT_DIM}
    return resolved.with_derived(usual, "assumed").config


@dataclass(frozen=True)
class Candidate:
    """A valid layout with the bytes of its fullest process, its seconds per step, and whether it fits."""

    plan: GpuLayout
    bytes: dict[str, int]
    seconds: dict[str, float]
    fits: bool

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())


def rank(config: cfg.Config, load: Load, gpus: int, machine: Machine) -> Ranking:
    """Every valid layout: the shortest step first, ties by memory.

    Raises
    ------
    ValueError : no layout is valid (with the faults of plain DP).
    """
    valid = []
    for plan in layouts(gpus):
        if not _faults(config, plan):
            needed = training_bytes(config.model, plan, load)
            fits = sum(needed.values()) * (1 + MARGIN) <= machine.gpu_memory_gib * GIB
            valid.append(Candidate(plan, needed, step_seconds(config.model, plan, load, machine), fits))
    if not valid:
        fault = _faults(config, GpuLayout(dp=gpus))[0]
        raise ValueError(f"no layout of {gpus} GPUs is valid for this model and batch: {fault}")
    valid.sort(key=lambda candidate: (round(candidate.step_s, 9), candidate.total_bytes))
    return Ranking(valid, machine.gpu_memory_gib)


def _faults(config: cfg.Config, plan: GpuLayout) -> list[cfg.Fault]:
    """Why a layout is not valid. The degrees in `config` are overwritten; nothing else reads them."""
    m = config.model
    m.tensor_model_parallel_size = plan.tp
    m.context_parallel_size = plan.cp
    m.pipeline_model_parallel_size = plan.pp
    m.sequence_parallel = plan.sp
    return checks.layout_faults(config, plan.gpus)


class Ranking(list[Candidate]):
    """Layouts, the shortest step first. gpu_memory_gib : memory of a GPU that they were searched for."""

    def __init__(self, candidates: Iterable[Candidate], gpu_memory_gib: float):
        super().__init__(candidates)
        self.gpu_memory_gib = gpu_memory_gib

    def to_frame(self) -> pd.DataFrame:
        """One row per layout: its degrees, GiB per GPU by owner, its time relative to the first that fits.

        `recompute_time`, `elementwise`, `communication` and `bubble` are the parts of that time that are not the
        model's matrix products. `step_s` is the absolute time, at the machine's rates.
        """
        import pandas as pd

        best_s = next((c for c in self if c.fits), self[0]).step_s
        rows = []
        for c in self:
            rows.append(
                {
                    "layout": str(c.plan),
                    **asdict(c.plan),
                    **{f"gib_{name}": part / GIB for name, part in c.bytes.items()},
                    "gib_total": c.total_bytes / GIB,
                    "fits": c.fits,
                    "step_s": c.step_s,
                    "relative_time": c.step_s / best_s,
                    **{name: part / best_s for name, part in c.seconds.items() if name != "compute"},
                    "overrides": c.plan.overrides(),
                }
            )
        return pd.DataFrame(rows)

    def table(self) -> pd.DataFrame:
        """The main columns of the fastest layouts that fit; if none does, of those that need the least memory."""
        frame = self.to_frame()
        best = frame[frame.fits] if frame.fits.any() else frame.sort_values("gib_total")
        return best[["layout", "gib_total", "step_s", "relative_time", "communication", "bubble"]].head(SHOWN)

    def __str__(self) -> str:
        """The number of layouts that fit, the table, and the settings of its first row."""
        table = self.table()
        settings = "The first one's settings: " + " ".join(self[table.index[0]].plan.overrides())
        return "\n".join([self._count(), table.to_string(index=False, float_format="%.2f"), settings])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """The table, with a bar of each layout's memory by owner against that of the card."""
        table = self.table()
        full = max(self.gpu_memory_gib, table.gib_total.max())
        keys = [fill(KEY, colour, name) for name, colour in COLOURS.items()]
        rows = []
        for i, row in table.iterrows():
            layout, _, recompute = row.layout.partition(" recompute ")
            parts = []
            for name, part in self[i].bytes.items():
                parts.append(fill(PART, f"{part / GIB / full:.2%}", COLOURS[name]))
            bar = fill(BAR, parts, f"{self.gpu_memory_gib / full:.2%}", f"{row.gib_total:.1f}")
            shares = [f"{row[name]:.0%}" for name in ("communication", "bubble")]
            rows.append(
                fill(ROW, [fill(CELL, cell) for cell in (layout, recompute, bar, f"{row.step_s:.2f}", *shares)])
            )
        memory = f"GiB of {self.gpu_memory_gib:g} a GPU"
        heads = [fill(CELL, fill("<b>{}</b>", head)) for head in ("layout", "recompute", memory, *LAST_HEADS)]
        page = "<div>{}</div><div>{}</div><table>{}{}</table>"
        return fill(page, self._count(), keys, fill(ROW, heads), rows)

    def _count(self) -> str:
        least = self.to_frame().groupby("recompute", sort=False).gib_total.min()
        each = ", ".join(f"{recompute} {gib:.1f}" for recompute, gib in least.items())
        fit = f"{sum(c.fits for c in self)} of {len(self)} layouts fit"
        return f"{fit}; the smallest needs {least.min():.1f} GiB a GPU (recompute {each})."


def training_cost(resolved: cfg.Resolved, processes: int = 1) -> tuple[int, int]:
    """Parameters, and bytes on the fullest of all `processes`, before anything is built, for packs of one sample."""
    config = fed(resolved)
    load = Load.of(config, 1, Load.text_tokens, cpu=True)
    by_owner = training_bytes(config.model, GpuLayout.of(config, processes), load)
    return counts.parameter_count(config.model), sum(by_owner.values())
