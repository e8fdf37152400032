"""The iteration at the heart of Muon: from matrices to nearly the nearest orthogonal ones. Pure; nothing but torch."""

from __future__ import annotations

import torch
from torch import Tensor


def orthogonal(m: Tensor, iterations: int = 5) -> Tensor:
    """Nearly the orthogonal factor of matrices [n, a, b]: the Newton-Schulz quintic of Jordan et al., Muon (2024), in m's precision.

    The singular vectors stay; singular values end between 0.7 and 1.2.
    """
    tall = m.shape[1] > m.shape[2]
    x = m.mT.contiguous() if tall else m
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if tall else x
