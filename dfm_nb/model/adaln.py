"""Shift, scale and gate of a packed sequence by conditioning row (adaLN; Peebles & Xie 2023, section 3.2).

Tables [R, h] have a row for each noise level of a pack; `Rows` maps tokens to rows. Expanding the tables to [S, h]
would give the same result, but backward would keep nine such tensors per layer. On CPU, neighbouring rows with equally
many tokens are one broadcast operation; on other devices, tables are gathered on the fly. Sums in the backward have a
fixed order, so training is reproducible on CUDA too.

Shapes, in the names of tensors: S tokens of this rank, R conditioning rows of the pack, h hidden. In a run of rows: r
rows, t tokens of each.

    row  = [0 0 0 1 1 1 2 2]        three rows of 3, 3 and 2 tokens
    runs  = rows [2, 1], tokens [3, 2]
    so x[0:6] viewed as [2, 3, h] times scale[0:2, None], then x[6:8] as [1, 2, h] times scale[2:3, None]
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Runs(NamedTuple):
    """Consecutive rows with equally many tokens, on the host. order : the rows as they come; None for 0, 1, 2, ..."""

    rows: list[int]
    tokens: list[int]  # of each row
    order: torch.Tensor | None

    @classmethod
    def of(cls, row: torch.Tensor) -> "Runs":
        order, lengths = torch.unique_consecutive(row, return_counts=True)
        rows: list[int] = []
        tokens: list[int] = []
        for length in lengths.tolist():
            if tokens and tokens[-1] == length:
                rows[-1] += 1
            else:
                rows.append(1)
                tokens.append(length)
        in_order = torch.equal(order, torch.arange(len(order)))
        return cls(rows, tokens, None if in_order else order)

    def over_rows(self, table_Rh: torch.Tensor) -> list[torch.Tensor]:
        """[R, h] -> [r, 1, h] of each run."""
        used = table_Rh[: sum(self.rows)] if self.order is None else table_Rh.index_select(0, self.order)
        return list(used[:, None].split(self.rows))

    def over_tokens(self, tokens_Sh: torch.Tensor) -> Iterator[torch.Tensor]:
        """[S, h] -> views [r, t, h] of each run."""
        parts = tokens_Sh.split([r * t for r, t in zip(self.rows, self.tokens)])
        for part, r in zip(parts, self.rows):
            yield part.view(r, -1, part.shape[-1])

    def product_backward(self, g_Sh: torch.Tensor, x_Sh: torch.Tensor, table_Rh: torch.Tensor):
        """Gradients of x * table[row] from that of the product: of x [S, h], and of the table [R, h]."""
        dx_Sh = torch.empty_like(x_Sh)
        dtable = []
        tensors = zip(self.over_rows(table_Rh), *map(self.over_tokens, (x_Sh, g_Sh, dx_Sh)))
        for table_r1h, x_rth, g_rth, dx_rth in tensors:
            dtable.append(torch.mul(g_rth, x_rth, out=dx_rth).sum(1))  # dx is only a buffer here
            torch.mul(g_rth, table_r1h, out=dx_rth)
        return dx_Sh, self.summed(dtable, table_Rh)

    def summed(self, sums: list[torch.Tensor], table_Rh: torch.Tensor) -> torch.Tensor:
        """Sums [r, h] of each run -> [R, h] like the table; rows without tokens get 0."""
        if self.order is not None:
            return torch.zeros_like(table_Rh).index_add_(0, self.order, torch.cat(sums))
        return F.pad(torch.cat(sums), (0, 0, 0, len(table_Rh) - sum(self.rows)))


class Rows(NamedTuple):
    """Which conditioning row each token has.

    row : int64 [S]. one_hot : [R, S], in the network's dtype, for sums over a row's tokens. On CPU `runs` instead.
    """

    row: torch.Tensor
    one_hot: torch.Tensor | None
    runs: Runs | None

    @classmethod
    def of(cls, row: torch.Tensor, count: int, dtype: torch.dtype) -> "Rows":
        if row.device.type == "cpu":
            return cls(row, None, Runs.of(row))
        numbers = torch.arange(count, device=row.device)[:, None]
        return cls(row, (row == numbers).to(dtype), None)


class _Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_Sh, shift_Rh, scale_Rh, row, one_hot):
        factor_Rh = 1 + scale_Rh
        ctx.save_for_backward(x_Sh, factor_Rh, row, one_hot)
        return torch.addcmul(shift_Rh.index_select(0, row), x_Sh, factor_Rh.index_select(0, row))

    @staticmethod
    def backward(ctx, g_Sh):
        x_Sh, factor_Rh, row, one_hot = ctx.saved_tensors
        return g_Sh * factor_Rh.index_select(0, row), one_hot @ g_Sh, one_hot @ (g_Sh * x_Sh), None, None


class _ModulateRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_Sh, shift_Rh, scale_Rh, runs):
        factor_Rh = 1 + scale_Rh
        ctx.runs = runs
        ctx.save_for_backward(x_Sh, factor_Rh)
        out_Sh = torch.empty_like(x_Sh)
        tables = zip(runs.over_rows(shift_Rh), runs.over_rows(factor_Rh))
        for (shift_r1h, factor_r1h), x_rth, out_rth in zip(tables, runs.over_tokens(x_Sh), runs.over_tokens(out_Sh)):
            torch.addcmul(shift_r1h, x_rth, factor_r1h, out=out_rth)
        return out_Sh

    @staticmethod
    def backward(ctx, g_Sh):
        x_Sh, factor_Rh = ctx.saved_tensors
        g_Sh = g_Sh.contiguous()
        dx_Sh, dscale_Rh = ctx.runs.product_backward(g_Sh, x_Sh, factor_Rh)
        dshift = [g_rth.sum(1) for g_rth in ctx.runs.over_tokens(g_Sh)]
        return dx_Sh, ctx.runs.summed(dshift, factor_Rh), dscale_Rh, None


class _AddGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_Sh, gate_Rh, y_Sh, row, one_hot):
        ctx.save_for_backward(gate_Rh, y_Sh, row, one_hot)
        return torch.addcmul(x_Sh, gate_Rh.index_select(0, row), y_Sh)

    @staticmethod
    def backward(ctx, g_Sh):
        gate_Rh, y_Sh, row, one_hot = ctx.saved_tensors
        return g_Sh, one_hot @ (g_Sh * y_Sh), g_Sh * gate_Rh.index_select(0, row), None, None


class _AddGatedRuns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_Sh, gate_Rh, y_Sh, runs):
        ctx.runs = runs
        ctx.save_for_backward(gate_Rh, y_Sh)
        out_Sh = torch.empty_like(x_Sh)
        tensors = zip(*map(runs.over_tokens, (x_Sh, y_Sh, out_Sh)))
        for gate_r1h, (x_rth, y_rth, out_rth) in zip(runs.over_rows(gate_Rh), tensors):
            torch.addcmul(x_rth, gate_r1h, y_rth, out=out_rth)
        return out_Sh

    @staticmethod
    def backward(ctx, g_Sh):
        gate_Rh, y_Sh = ctx.saved_tensors
        dy_Sh, dgate_Rh = ctx.runs.product_backward(g_Sh.contiguous(), y_Sh, gate_Rh)
        return g_Sh, dgate_Rh, dy_Sh, None


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: Rows) -> torch.Tensor:
    """x * (1 + scale[row]) + shift[row]; x : [S, h], contiguous; shift, scale : [R, h]."""
    if rows.runs is not None:
        return _ModulateRuns.apply(x, shift, scale, rows.runs)
    return _Modulate.apply(x, shift, scale, rows.row, rows.one_hot)


def add_gated(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, rows: Rows) -> torch.Tensor:
    """x + gate[row] * y; x, y : [S, h], contiguous; gate : [R, h]."""
    if rows.runs is not None:
        return _AddGatedRuns.apply(x, gate, y, rows.runs)
    return _AddGated.apply(x, gate, y, rows.row, rows.one_hot)


def modulated_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: Rows, eps: float) -> torch.Tensor:
    """`modulate` of the layer norm of x without weights: shift and scale replace them."""
    return modulate(F.layer_norm(x, x.shape[-1:], eps=eps), shift, scale, rows)
