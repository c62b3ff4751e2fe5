"""The gradient norm over everything, with every parameter counted once, and clipping by it.

[Note: slots] There is one slot for each (parameter, tp shard, dp slice), at every ZeRO stage. Each
is written by exactly one rank, so the sum over the world only adds zeros and is exact, and then
every rank adds up the slots in one fixed order: the norm has the same bits however the model is cut
over pipeline stages or ZeRO stages, and on every rank.

[Note: copies] Of a parameter that is replicated over tp, rank 0 writes the slot; of a tied one, the
pipeline rank of its owner; of shards that have replicas, the first. The others add zero times their
own squared norm: nothing, unless their copy alone is not finite, which all ranks then see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..placement import Placement, Shard
from ..topology import Axis
from ..zero.flat import Flat

EPSILON = 1e-6


class NormSlots:
    """The slots of the whole model, and the gradients whose norms this rank writes.

    Args:
        placements: of each trained parameter of the whole model, in order, by index.
        flats: what this rank trains.
        tp: the tensor-parallel axis.
        dp: the ranks that share out the gradients.
        replicas: the ranks that hold the same shards, of which the first writes.
    """

    def __init__(
        self,
        placements: Mapping[int, Placement],
        flats: Sequence[Flat],
        tp: Axis,
        dp: Axis,
        replicas: Axis | None = None,
    ) -> None:
        first: dict[int, int] = {}
        spare = replicas is not None and replicas.rank > 0
        self.count = 0
        for index, placement in placements.items():
            first[index] = self.count
            self.count += dp.size * (tp.size if isinstance(placement, Shard) else 1)
        places, weights = [], []
        self._views: list[Tensor] = []
        for flat in flats:
            for held, start, stop in flat.parts(*flat.owned):
                cut = isinstance(placements[held.index], Shard)
                places.append(first[held.index] + dp.rank + (tp.rank * dp.size if cut else 0))
                weights.append(float((cut or tp.rank == 0) and not (flat.copy or spare)))
                low = flat.owned[0]
                self._views.append(flat.owned_grad[start - low : stop - low])
        device = flats[0].data.device if flats else None
        self._places = torch.tensor(places, dtype=torch.int64, device=device)
        self._weights = torch.tensor(weights, dtype=torch.float64, device=device)

    def squares(self, out: Tensor) -> None:
        """Write the squared norms of this rank's parts into ``out`` [count], fp64, zeros before."""
        if self._views:
            norms = torch.stack(torch._foreach_norm(self._views, 2)).double()
            out[self._places] = norms * norms * self._weights


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """``min(1, max_norm / (norm + 1e-6))``, as ``torch.nn.utils.clip_grad_norm_``."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + EPSILON))


def clip(flats: Sequence[Flat], coefficient: float) -> None:
    """Scale the gradients that the optimizer will use, in place."""
    if coefficient != 1 and flats:  # a stage may have nothing to train
        torch._foreach_mul_([flat.updated_grad for flat in flats], coefficient)
