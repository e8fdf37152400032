"""Shift, scale and gate of a packed sequence by conditioning row (adaLN; Peebles & Xie 2023, section 3.2).

Tables [R, h] have a row for each noise level of a pack; a `RowMap` says which row a token has. Expanding the tables to
[S, h] would give the same, but nine such tensors a layer would be kept for backward. On CPU, neighbouring rows with
equally many tokens are one broadcast operation; on CUDA, tables are gathered on the fly. Sums in the backward have a
fixed order, so training is reproducible on CUDA too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch


class RowMap:
    """Which conditioning row each token has. index : int64 [S]."""

    def __init__(self, index: torch.Tensor):
        self.index = index

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int, int]]:
        """(first row, rows, first token, tokens a row) of consecutive rows with equally many tokens.

        For CPU: it reads `index`, and a GPU would be waited for.
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
        """(rows, views [rows, tokens a row, h]) of each run."""
        for row, count, start, length in self.runs:
            stop = start + count * length
            yield slice(row, row + count), [t[start:stop].view(count, length, t.shape[-1]) for t in tokens]

    def expand(self, table: torch.Tensor) -> torch.Tensor:
        """[R, h] -> [S, 1, h]."""
        return table.index_select(0, self.index)[:, None]

    def sum(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """[S, 1, h] -> [count, h], the sums over each row's tokens."""
        one_hot = self.index == torch.arange(count, device=self.index.device)[:, None]
        return one_hot.to(tokens.dtype) @ tokens[:, 0]


class _Modulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shift, scale, rows):
        ctx.rows = rows
        ctx.save_for_backward(x, scale)
        if x.is_cuda:
            return torch.addcmul(rows.expand(shift), x, 1 + rows.expand(scale))
        out = torch.empty_like(x)
        for at, (x_, out_) in rows.spans(x, out):
            torch.addcmul(shift[at, None], x_, 1 + scale[at, None], out=out_)
        return out

    @staticmethod
    def backward(ctx, grad):
        (x, scale), rows, grad = ctx.saved_tensors, ctx.rows, grad.contiguous()
        if x.is_cuda:
            return grad * (1 + rows.expand(scale)), rows.sum(grad, len(scale)), rows.sum(grad * x, len(scale)), None
        dx, dshift, dscale = torch.empty_like(x), torch.zeros_like(scale), torch.zeros_like(scale)
        for at, (x_, grad_, dx_) in rows.spans(x, grad, dx):
            dshift[at] += grad_.sum(1)
            dscale[at] += torch.mul(grad_, x_, out=dx_).sum(1)
            torch.mul(grad_, 1 + scale[at, None], out=dx_)
        return dx, dshift, dscale, None


class _AddGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, y, rows):
        ctx.rows = rows
        ctx.save_for_backward(gate, y)
        if x.is_cuda:
            return torch.addcmul(x, rows.expand(gate), y)
        out = torch.empty_like(x)
        for at, (x_, y_, out_) in rows.spans(x, y, out):
            torch.addcmul(x_, gate[at, None], y_, out=out_)
        return out

    @staticmethod
    def backward(ctx, grad):
        (gate, y), rows, grad = ctx.saved_tensors, ctx.rows, grad.contiguous()
        if y.is_cuda:
            return grad, rows.sum(grad * y, len(gate)), grad * rows.expand(gate), None
        dgate, dy = torch.zeros_like(gate), torch.empty_like(y)
        for at, (y_, grad_, dy_) in rows.spans(y, grad, dy):
            dgate[at] += torch.mul(grad_, y_, out=dy_).sum(1)
            torch.mul(grad_, gate[at, None], out=dy_)
        return grad, dgate, dy, None


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, rows: RowMap) -> torch.Tensor:
    """x * (1 + scale[row]) + shift[row]; x : [S, 1, h], contiguous; shift, scale : [R, h]."""
    return _Modulate.apply(x, shift, scale, rows)


def add_gated(x: torch.Tensor, gate: torch.Tensor, y: torch.Tensor, rows: RowMap) -> torch.Tensor:
    """x + gate[row] * y; x, y : [S, 1, h], contiguous; gate : [R, h]."""
    return _AddGated.apply(x, gate, y, rows)
