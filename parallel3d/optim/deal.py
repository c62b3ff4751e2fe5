"""Who makes the update of which matrix, and what travels there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..topology import Axis
from .whole import Slice


class Deal:
    """Matrices dealt out to the ranks of their axis, by what an update costs, the dearest first.

    Where a rank updates everything it has everything, and does it all.

    Args:
        matrices: one or more, the same in the same order on all ranks of the plane.

    ``mine`` are those that this rank makes; ``here`` those of which it has a part, in the order of
    their owners. ``sent`` and ``received`` are elements, to and from each rank of ``axis``.
    """

    def __init__(self, matrices: Sequence[Slice]) -> None:
        self.flat = matrices[0].flat
        self.axis = self.flat.axis if self.flat.updated == self.flat.owned else Axis.single()
        owners = dealt([_cost(each) for each in matrices], self.axis.size)
        by_owner: list[list[Slice]] = [[] for _ in range(self.axis.size)]
        for each, owner in zip(matrices, owners, strict=True):
            by_owner[owner].append(each)
        self.mine = by_owner[self.axis.rank]
        self.here = [each for owned in by_owner for each in owned if each.here]
        self.sent = [sum(s.high - s.low for s in owned if s.here) for owned in by_owner]
        self._shares = [
            [_share(each, rank, self.axis) for each in self.mine] for rank in range(self.axis.size)
        ]
        self.received = [sum(high - low for low, high in shares) for shares in self._shares]

    @property
    def nbytes(self) -> int:
        """That this rank sends: momentum there, and updates back."""
        rank = self.axis.rank
        others = sum(self.sent) - self.sent[rank] + sum(self.received) - self.received[rank]
        return others * self.flat.master.element_size()

    def packed(self, make: Callable[[Slice], Tensor]) -> Tensor:
        """What is made for each slice that is here, one after another."""
        packed = self.flat.master.new_empty(sum(self.sent))
        start = 0
        for each in self.here:
            stop = start + each.high - each.low
            packed[start:stop] = make(each)
            start = stop
        return packed

    def joined(self, arrived: Tensor) -> list[Tensor]:
        """The local part [local shape] of each of ``mine``, from what every rank had of it."""
        joined = [arrived.new_zeros(each.held.parameter.numel()) for each in self.mine]
        at = 0
        for shares in self._shares:
            for matrix, (low, high) in zip(joined, shares, strict=True):
                matrix[low:high] = arrived[at : at + high - low]
                at += high - low
        return [m.view(s.held.parameter.shape) for m, s in zip(joined, self.mine, strict=True)]

    def shared_out(self, done: Sequence[Tensor]) -> Tensor:
        """The flat local part of each of ``mine``, in parts of every rank's: undoes ``joined``."""
        empty = self.flat.master.new_empty(0)
        parts = [
            matrix[slice(*span)]
            for shares in self._shares
            for matrix, span in zip(done, shares, strict=True)
        ]
        return torch.cat([empty, *parts])


def dealt(costs: Sequence[float], count: int) -> list[int]:
    """An owner for each, the dearest first to whoever has least."""
    loads, owners = [0.0] * count, [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        owners[at] = loads.index(min(loads))
        loads[owners[at]] += costs[at]
    return owners


def _cost(each: Slice) -> float:
    """In proportion to the multiplications of an iteration."""
    rows, cols = each.shape
    return float(rows * cols * min(rows, cols))


def _share(each: Slice, rank: int, axis: Axis) -> tuple[int, int]:
    """What a rank of ``axis`` has of the local parameter, in its elements."""
    length = each.held.parameter.numel()
    if axis.size == 1:
        return 0, length
    shard = each.flat.owned[1] - each.flat.owned[0]
    low, high = rank * shard - each.start, (rank + 1) * shard - each.start
    return min(max(low, 0), length), max(min(high, length), 0)
