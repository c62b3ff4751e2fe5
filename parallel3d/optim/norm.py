"""The gradient norm over everything, with every parameter counted once, and clipping by it.

[Note: slots] There is one slot for each (parameter, tp shard, dp slice), at every ZeRO stage. Each
is written by exactly one rank, so the sum over the world only adds zeros and is exact, and then
every rank adds up the slots in one fixed order: the norm has the same bits however the model is cut
over pipeline stages or ZeRO stages, and on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..placement import Placement, Shard
from ..topology import Axis
from ..zero.flat import Flat

EPSILON = 1e-6


@dataclass
class NormSlots:
    """Numbers the slots of the whole model's trained parameters.

    Args:
        placements: of each trained parameter of the whole model, in order, by index.
        tp: the tensor-parallel axis.
        dp: the data-parallel axis.
    """

    placements: dict[int, Placement]
    tp: Axis
    dp: Axis

    def __post_init__(self) -> None:
        self.first: dict[int, int] = {}
        self.count = 0
        for index, placement in self.placements.items():
            self.first[index] = self.count
            self.count += self.dp.size * (self.tp.size if isinstance(placement, Shard) else 1)

    def squares(self, flats: list[Flat], out: Tensor) -> None:
        """Write the squared norms of this rank's parts into ``out`` [count], fp64, else zero."""
        views, places = [], []
        for flat in flats:
            for held, start, stop in flat.owned_parts():
                place = self._place(held.index)
                if place is not None:
                    views.append(flat.grad[start:stop])
                    places.append(place)
        if views:
            norms = torch.stack(torch._foreach_norm(views, 2)).double()
            out[torch.tensor(places, device=out.device)] = norms * norms

    def _place(self, index: int) -> int | None:
        """This rank's slot of a parameter; None where tp rank 0 speaks for a replicated one."""
        if isinstance(self.placements[index], Shard):
            return self.first[index] + self.tp.rank * self.dp.size + self.dp.rank
        return self.first[index] + self.dp.rank if self.tp.rank == 0 else None


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """``min(1, max_norm / (norm + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + EPSILON))


def clip(flats: list[Flat], coefficient: float) -> None:
    """Scale the gradients that the optimizer will use, in place."""
    if coefficient < 1:
        torch._foreach_mul_([flat.updated_grad for flat in flats], coefficient)
