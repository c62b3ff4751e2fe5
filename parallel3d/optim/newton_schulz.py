"""The nearest orthogonal matrix, roughly, in bf16: what Muon makes of an update."""

from __future__ import annotations

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]


def orthogonal(update: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Of a matrix, one with singular values near 1 and the same directions; in bf16.

    The quintic iteration of Jordan et al. (2024, kellerjordan.github.io/posts/muon), with the same
    bits as ``torch.optim.Muon``.

    Args:
        update: [rows, cols].
        coefficients: of the first, third and fifth power.
        steps: of the iteration.
        eps: the least norm that it is divided by.
    """
    a, b, c = coefficients
    x = update.bfloat16()
    is_tall = x.size(0) > x.size(1)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
