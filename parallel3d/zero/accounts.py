"""What a step sends and keeps for its parameters, on paper: the law of each stage, and padding.

Nothing is run for these numbers. They rest on the sizes of the flat buffers, on when a program uses
which unit, and on the number of buffers that may be under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .flat import Flat
from .gradients import IN_FLIGHT
from .residency import Traffic, plan, traffic
from .shards import Shards
from .values import Owned


class Sent(NamedTuple):
    """Bytes that a rank sends in a step.

    ``values`` and ``gradients`` go over dp, to all that share a shard out or have the same one,
    as does what an ``optimizer`` sends to update whole parameters; ``ties`` are gradients of tied
    parameters, over pp.
    """

    values: int
    gradients: int
    ties: int
    optimizer: int = 0

    @property
    def over_dp(self) -> int:
        """All but ties."""
        return self.values + self.gradients + self.optimizer


class Touch(NamedTuple):
    """A program works on a unit's gradients: before it does, or when those of a microbatch are
    complete (``done``), and with ``reduce`` ready to be summed.
    """

    unit: int
    microbatch: int
    done: bool = False
    reduce: bool = False


def sent(shards: Shards, uses: Sequence[int], num_microbatches: int) -> Sent:
    """Of a training step that uses units' parameters in this order, as did the one before it.

    With ``d`` ranks, a reduction or gather of ``n`` elements, padding and all, sends
    ``n (d - 1) / d``. The stages differ in how many there are.
    """
    return Sent(_values(shards, uses), _gradients(shards, num_microbatches), _ties(shards))


def gathered(shards: Shards, uses: Sequence[int]) -> Traffic:
    """Bytes that a program gathers at stage 3, whole buffers, and the most that are there at once.

    Nothing below stage 3, where values stay.
    """
    values = shards.values
    if not isinstance(values, Owned):
        return Traffic(0, 0, 0)
    sizes = {flat: flat.nbytes for flat in values.units}
    order = [values.needs.get(unit, ()) for unit in uses]
    return traffic(plan(order, sizes, values.budget), sizes)


def gradient_bytes(shards: Shards, touches: Iterable[Touch]) -> int:
    """The most bytes of gradients at one time in a step: kept, lent to backwards, and under way.

    A sum that is under way takes its buffer, a copy in another dtype if it is sent in that, and
    as much memory to receive in.
    """
    flats, wire = shards.flats, shards.gradients.wire
    lends = any(flat.stage >= 2 for flat in shards.all())
    now = sum(_bytes(flat.owned_grad if lends else flat.grad) for flat in shards.all())
    lent: set[tuple[int, int]] = set()
    moving: deque[int] = deque()
    most = now
    for unit, microbatch, done, reduce in touches:
        own = flats.get(unit, ())
        size = sum(flat.length * flat.wide.itemsize for flat in own)
        place = unit, microbatch if shards.gradients.each else 0
        if own and lends and place not in lent:
            now -= _let_in(moving)
            lent.add(place)
            now += size
        if own and done and reduce:
            now -= _let_in(moving)
            lent.discard(place)
            extra = sum(_under_way(flat, wire) for flat in own)
            moving.append(extra + size * lends)
            now += extra
        most = max(most, now)
    return most


def _let_in(moving: deque[int]) -> int:
    freed = 0
    while len(moving) >= IN_FLIGHT:
        freed += moving.popleft()
    return freed


def _under_way(flat: Flat, wire: torch.dtype | None) -> int:
    width = _width(flat, wire)
    copied = width < flat.wide.itemsize
    return flat.length * width * (2 if copied else 1) if flat.axis.size > 1 else 0


def _values(shards: Shards, uses: Sequence[int]) -> int:
    if shards.keeps_owned:
        return _over(shards.held()[0], gathered(shards, uses).bytes)
    return sum(_over(flat, flat.nbytes) for flat in shards.trained() if flat.stage > 0)


def _gradients(shards: Shards, num_microbatches: int) -> int:
    mine, total = shards.gradients, 0
    for flat in shards.all():
        width, part = _width(flat, mine.wire), flat.length // flat.axis.size
        times = num_microbatches if mine.each else 1
        total += times * _over(flat, flat.length * width)
        others = mine.replicas.size - 1
        total += part * (width + flat.wide.itemsize) * others // mine.replicas.size
        if flat.stage == 0 and flat.of is None:
            total += _over(flat, flat.length * flat.wide.itemsize)
    return total


def _ties(shards: Shards) -> int:
    total = 0
    for tie in shards.gradients.ties.ties:
        mine = sum(rank == tie.axis.rank for rank in tie.uses.values())
        total += mine * _bytes(tie.home.owned_grad) * (tie.axis.size - 1)
    return total


def _over(flat: Flat, size: int) -> int:
    return size * (flat.axis.size - 1) // flat.axis.size


def _width(flat: Flat, wire: torch.dtype | None) -> int:
    """Bytes of an element that is summed."""
    return min(flat.wide.itemsize, wire.itemsize if wire else flat.wide.itemsize)


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
