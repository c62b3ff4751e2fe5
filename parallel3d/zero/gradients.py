"""Gradients on their way from a unit's backward into the owned shards.

A unit's gradients are summed over ``axis`` the moment they are complete, so that the sum runs
beside the backward of the units before it. No more than ``IN_FLIGHT`` units' sums are under way at
once: their buffers are all that is kept of a step besides the shards, whatever its length.

[Note: each] From stage 2 on, gradients have no place of their own between steps. A buffer is made
when a unit's backward begins and freed when its sum has arrived: one a step, or with ``each`` one
for each microbatch, whose sums are added up in the order of microbatches. A backward in two parts
fills one buffer, so that its bits are those of a backward in one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..comm.collectives import Pending, start_all_gather, start_reduce_scatter, writes_unwaited
from ..topology import Axis
from .flat import Flat
from .ties import Tie, Ties

IN_FLIGHT = 2


class Gradients:
    """The gradients of a rank's units, reduced over the axis of their flat buffers.

    Args:
        flats: of each unit.
        replicas: the ranks that hold the same shards, over which those are summed once a step.
        each: reduce in every microbatch, from stage 2 on.
        ties: of which this rank holds a use.
        wire: what gradients are rounded to before they are summed; None for their own dtype.
    """

    def __init__(
        self,
        flats: Mapping[int, Sequence[Flat]],
        replicas: Axis,
        each: bool = False,
        ties: Sequence[Tie] = (),
        wire: torch.dtype | None = None,
    ) -> None:
        self.flats, self.replicas, self.each, self.wire = flats, replicas, each, wire
        self.ties = Ties(ties)
        self._count = 1
        self._lent: dict[int, dict[int, list[Tensor]]] = {}
        self._place: dict[int, int] = {}
        self._moving: deque[list[Pending]] = deque()
        self._latest: dict[Flat, Pending] = {}
        self._sums: dict[Flat, Pending] = {}
        self._in_place: list[Pending] = []

    def begin(self, num_microbatches: int) -> None:
        """Of a step; the last microbatch completes the gradients."""
        self._count = num_microbatches

    def before(self, unit: int, microbatch: int) -> None:
        """Called before each part of a backward: there is a place for its gradients."""
        flats = self.flats.get(unit, ())
        if not flats or flats[0].stage < 2:
            return
        at = microbatch if self.each else 0
        lent = self._lent.setdefault(unit, {})
        if at not in lent:
            self._let_in()
            lent[at] = [_zeros(flat) for flat in flats]
        if self._place.get(unit) == at:
            return
        for flat, buffer in zip(flats, lent[at], strict=True):
            flat.check()
            flat.lend(buffer)
        self._place[unit] = at

    def reduce(self, unit: int, microbatch: int) -> None:
        """Called when a unit's gradients are complete, or with ``each`` those of a microbatch."""
        flats = self.flats.get(unit, ())
        if not flats:
            return
        self._let_in()
        at, final = (microbatch, microbatch == self._count - 1) if self.each else (0, True)
        self._moving.append([self._start(flat, unit, final) for flat in flats])
        self._lent.get(unit, {}).pop(at, None)
        self._place.pop(unit, None)
        self.ties.advance(self._sums)

    def finish(self) -> None:
        """Wait for every sum; add up the uses of tied parameters; at stage 0 gather the sums."""
        self.ties.advance(self._sums, last=True)
        while self._moving:
            self._finish_oldest()
        self.ties.add_up()
        gathers = [
            start_all_gather(flat.owned_grad, flat.updated_grad, flat.axis, tag=f"unit {unit}")
            for unit in sorted(self.flats)
            for flat in self.flats[unit]
            if flat.stage == 0 and flat.of is None
        ]
        for gather in gathers:
            gather.wait()
        self._forget()

    def abandon(self) -> None:
        """After an error in the middle of a step: the next one starts from zero.

        Sums that are still written into gradients come before they are set to zero. Only a stream
        waits for them: for the host that might be forever, if other ranks failed earlier.
        """
        for sent in self._in_place:
            sent.wait()
        self._moving.clear()
        self.ties.forget()
        for unit in self._lent:
            for flat in self.flats[unit]:
                flat.take_back()
        self._forget()
        self.zero()

    def zero(self) -> None:
        """Set every gradient that is kept to zero, in place."""
        for flats in self.flats.values():
            for flat in flats:
                flat.zero_gradient()

    def _forget(self) -> None:
        self._in_place.clear()
        for each in (self._lent, self._place, self._latest, self._sums):
            each.clear()

    def _let_in(self) -> None:
        while len(self._moving) >= IN_FLIGHT:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        for pending in self._moving.popleft():
            pending.wait()

    def _start(self, flat: Flat, unit: int, final: bool) -> Pending:
        """The sum of one buffer, which when waited for has arrived in ``owned_grad``."""
        buffer, before = flat.grad, self._latest.get(flat)
        assert buffer is not None
        part = buffer[slice(*flat.owned)]
        sent = start_reduce_scatter(buffer, part, flat.axis, wire=self.wire, tag=f"unit {unit}")
        if flat.stage >= 2:
            flat.take_back()
        elif writes_unwaited(flat.axis, buffer):
            self._in_place.append(sent)

        def wait() -> Tensor:
            if before is not None:
                before.wait()
            arrived = sent.wait()
            if flat.stage >= 2:
                flat.owned_grad.add_(arrived)
            if final:
                self._over_replicas(flat.owned_grad, unit)
            return flat.owned_grad

        pending = self._latest[flat] = Pending(wait)
        if final:
            self._sums[flat] = pending
        return pending

    def _over_replicas(self, shard: Tensor, unit: int) -> None:
        axis = self.replicas
        if axis.size > 1:
            mine = shard.chunk(axis.size)[axis.rank]
            tag = f"unit {unit} replicas"
            start_reduce_scatter(shard, mine, axis, wire=self.wire, tag=tag).wait()
            start_all_gather(mine, shard, axis, tag=tag).wait()


def _zeros(flat: Flat) -> Tensor:
    return torch.zeros(flat.length, dtype=flat.wide, device=flat.data.device)
