"""Shift, scale and gate of a packed sequence by conditioning row (adaLN; Peebles & Xie 2023, section 3.2).

Tables [R, h] have a row for each noise level of a pack; a `RowMap` maps tokens to rows. Expanding the tables to [S, h]
would give the same result, but backward would keep nine such tensors per layer. On CPU, neighbouring rows with equally
many tokens are one broadcast operation; on CUDA, tables are gathered on the fly. Sums in the backward have a fixed
order, so training is reproducible on CUDA too.

Shapes, in the names of tensors: S tokens of this rank, R conditioning rows of the pack, h hidden; 1 is megatron-core's
batch. In a run of rows: r rows, t tokens of each.

    index = [0 0 0 1 1 1 2 2]             three rows of 3, 3 and 2 tokens
    runs  = [(0, 2, 0, 3), (2, 1, 6, 2)]  rows 0-1 are tokens 0-5, 3 each; row 2 is tokens 6-7
    so x[0:6] viewed as [2, 3, h] times scale[0:2, None], then x[6:8] as [1, 2, h] times scale[2:3, None]
"""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F


class RowMap:
    """Which conditioning row each token has. index : int64 [S]."""

    def __init__(self, index: torch.Tensor):
        self.index = index
        self._one_hot: torch.Tensor | None = None  # [R, S]

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int, int]]:
        """(first row, rows, first token, tokens a row) of consecutive rows with equally many tokens.

        For CPU only: it reads `index`, which would synchronise with a GPU.
        """
        rows, counts = torch.unique_consecutive(self.index, return_counts=True)
        out: list[tuple[int, int, int, int]] = []
        start = 0
        for row, length in zip(rows.tolist(), counts.tolist()):
            if out and out[-1][3] == length and out[-1][0] + out[-1][1] == row:
                first, count, begin, _ = out[-1]
                out[-1] = (first, count + 1, begin, length)
            else:
                out.append((row, 1, start, length))
            start += length
        return out

    def spans(self, *tokens: torch.Tensor) -> Iterator[tuple[slice, list[torch.Tensor]]]:
        """(rows, views [r, t, h] of tensors [S, 1, h]) of each run."""
        for row, count, start, length in self.runs:
            stop = start + count * length
            yield slice(row, row + count), [t[start:stop].view(count, length, t.shape[-1]) for t in tokens]

    def expand(self, table: torch.Tensor) -> torch.Tensor:
        """[R, h] -> [S, 1, h]."""
        return table.index_select(0, self.index)[:, None]

    def sum(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """[S, 1, h] -> [count, h], the sums over each row's tokens."""
        if self._one_hot is None:  # of all layers: made for each sum, it took a seventh of a step on an H100's host
            rows = torch.arange(count, device=self.index.device)[:, None]
            self._one_hot = (self.index == rows).to(tokens.dtype)
        return self._one_hot @ tokens[:, 0]


class _Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_S1h, shift_Rh, scale_Rh, rows):
        ctx.rows = rows
        ctx.save_for_backward(x_S1h, scale_Rh)
        if x_S1h.is_cuda:
            return torch.addcmul(rows.expand(shift_Rh), x_S1h, rows.expand(1 + scale_Rh))
        out_S1h = torch.empty_like(x_S1h)
        for at, (x_rth, out_rth) in rows.spans(x_S1h, out_S1h):
            torch.addcmul(shift_Rh[at, None], x_rth, 1 + scale_Rh[at, None], out=out_rth)
        return out_S1h

    @staticmethod
    def backward(ctx, grad):
        (x_S1h, scale_Rh), rows, g_S1h = ctx.saved_tensors, ctx.rows, grad.contiguous()
        if x_S1h.is_cuda:
            count = len(scale_Rh)
            return g_S1h * rows.expand(1 + scale_Rh), rows.sum(g_S1h, count), rows.sum(g_S1h * x_S1h, count), None
        dx_S1h = torch.empty_like(x_S1h)
        dshift_Rh = torch.zeros_like(scale_Rh)
        dscale_Rh = torch.zeros_like(scale_Rh)
        for at, (x_rth, g_rth, dx_rth) in rows.spans(x_S1h, g_S1h, dx_S1h):
            dshift_Rh[at] += g_rth.sum(1)
            dscale_Rh[at] += torch.mul(g_rth, x_rth, out=dx_rth).sum(1)  # dx is only a buffer here
            torch.mul(g_rth, 1 + scale_Rh[at, None], out=dx_rth)
        return dx_S1h, dshift_Rh, dscale_Rh, None


class _AddGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_S1h, gate_Rh, y_S1h, rows):
        ctx.rows = rows
        ctx.save_for_backward(gate_Rh, y_S1h)
        if x_S1h.is_cuda:
            return torch.addcmul(x_S1h, rows.expand(gate_Rh), y_S1h)
        out_S1h = torch.empty_like(x_S1h)
        for at, (x_rth, y_rth, out_rth) in rows.spans(x_S1h, y_S1h, out_S1h):
            torch.addcmul(x_rth, gate_Rh[at, None], y_rth, out=out_rth)
        return out_S1h

    @staticmethod
    def backward(ctx, grad):
        (gate_Rh, y_S1h), rows, g_S1h = ctx.saved_tensors, ctx.rows, grad.contiguous()
        if y_S1h.is_cuda:
            return g_S1h, rows.sum(g_S1h * y_S1h, len(gate_Rh)), g_S1h * rows.expand(gate_Rh), None
        dgate_Rh = torch.zeros_like(gate_Rh)
        dy_S1h = torch.empty_like(y_S1h)
        for at, (y_rth, g_rth, dy_rth) in rows.spans(y_S1h, g_S1h, dy_S1h):
            dgate_Rh[at] += torch.mul(g_rth, y_rth, out=dy_rth).sum(1)  # as above
            torch.mul(g_rth, gate_Rh[at, None], out=dy_rth)
        return g_S1h, dgate_Rh, dy_S1h, None


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: RowMap) -> torch.Tensor:
    """x * (1 + scale[row]) + shift[row]; x : [S, 1, h], contiguous; shift, scale : [R, h]."""
    return _Modulate.apply(x, shift, scale, rows)


def add_gated(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, rows: RowMap) -> torch.Tensor:
    """x + gate[row] * y; x, y : [S, 1, h], contiguous; gate : [R, h]."""
    return _AddGated.apply(x, gate, y, rows)


def modulated_norm(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: RowMap, eps: float) -> torch.Tensor:
    """`modulate` of the layer norm of x without weights: shift and scale replace them."""
    return modulate(F.layer_norm(x, x.shape[-1:], eps=eps), shift, scale, rows)
