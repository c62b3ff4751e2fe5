"""Tied parameters: the gradients of all uses brought together on every rank that holds one.

[Note: unit order] Each use has a gradient buffer and a reduction over ``dp`` of its own. The
reduced shards then travel whole, use by use, and every holder adds them up in unit order: the sum
has the bits that one rank would give it, on each of them, and their optimizers make the same
update. Sums over what a rank holds would not do, where a V placement puts the first and the last
use on one rank and another use between them. A use's shard of ``n / d`` elements is broadcast to
the ``h - 1`` other holders, so a tie of two ranks sends no more than an all-reduce would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.collectives import Pending, start_broadcast
from ..topology import Axis
from .flat import Flat


@dataclass(frozen=True)
class Tie:
    """A trained parameter that several units use, as one of its holders sees it.

    Args:
        name: of the owner, its first use.
        axis: the pipeline ranks that hold a use, of this rank's dp and tp coordinates.
        uses: by unit, in unit order, the rank on ``axis`` that holds it.
        flats: by unit, those that are here; all but the first share its parameter.
    """

    name: str
    axis: Axis
    uses: Mapping[int, int]
    flats: Mapping[int, Flat]

    @property
    def home(self) -> Flat:
        """The one here that is updated."""
        return next(iter(self.flats.values()))


class Ties:
    """Moves and adds up the gradients of a rank's ties, in model order of their owners."""

    def __init__(self, ties: Sequence[Tie] = ()) -> None:
        self.ties = ties
        # The last unit first, as backwards end; one order for all ranks, whatever they share.
        self._turns = sorted(
            ((unit, tie) for tie in ties for unit in tie.uses if tie.axis.size > 1),
            key=lambda turn: -turn[0],
        )
        self._moving: dict[tuple[str, int], Pending] = {}

    def advance(self, reducing: Mapping[Flat, Pending], last: bool = False) -> None:
        """Start, in turn, what has been reduced; if ``last``, everything.

        ``reducing`` has the reductions of the step. That they have been waited for counts, not that
        they have arrived: else ranks would start the same communications in different orders.
        """
        for unit, tie in self._turns[len(self._moving) :]:
            flat = tie.flats.get(unit)
            if flat is None:
                shard = torch.empty_like(tie.home.owned_grad)
            elif last or (flat in reducing and reducing[flat].is_over):
                shard = reducing[flat].wait()
            else:
                return
            pending = start_broadcast(shard, tie.axis, tie.uses[unit], tag=f"tie {tie.name}")
            self._moving[tie.name, unit] = pending

    def add_up(self) -> None:
        """The sum of all uses, into the owned gradient of each tie's ``home``."""
        for pending in self._moving.values():
            pending.wait()
        for tie in self.ties:
            total, *others = (self._shard(tie, unit) for unit in tie.uses)
            for other in others:
                total.add_(other)
            if total.data_ptr() != tie.home.owned_grad.data_ptr():
                tie.home.owned_grad.copy_(total)
        self.forget()

    def forget(self) -> None:
        """Begin anew: of a step that failed nothing is left."""
        self._moving.clear()

    def _shard(self, tie: Tie, unit: int) -> Tensor:
        """A use's reduced gradient, from wherever it came."""
        flat = tie.flats.get(unit)
        return self._moving[tie.name, unit].wait() if flat is None else flat.owned_grad
