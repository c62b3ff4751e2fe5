"""Dropout whose mask depends on position, never on what was drawn before."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..rng import new_seed, seed_of
from ..topology import Axis


class Dropout(nn.Module):
    """Zero each element with probability ``p`` and scale the others by ``1 / (1 - p)``.

    The mask is drawn from one number of the CPU's default generator, which the engine seeds by
    (seed, step, slot, unit) before each unit: so the mask is the same in a recompute and on every
    rank of an axis over which the activation is whole.

    Moves   nothing.
    Equals  ``nn.Dropout``; with ``axis``, on an activation cut over that axis, each rank has a
            mask of its own.
    """

    def __init__(self, p: float = 0.5, *, axis: Axis | None = None) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout = {p} must be at least 0 and below 1")
        self.p, self.axis = p, axis

    def forward(self, x: Tensor) -> Tensor:
        """Any shape; unchanged in evaluation."""
        if not self.training or self.p == 0:
            return x
        seed = seed_of(new_seed(), self.axis.rank if self.axis else 0)
        generator = torch.Generator(x.device).manual_seed(seed)
        keep = torch.empty_like(x).bernoulli_(1 - self.p, generator=generator)
        return x * keep.div_(1 - self.p)

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"
