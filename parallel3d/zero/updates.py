"""Updates made on the host, unit by unit, beside the device and beside each other's copies.

A unit's reduced gradient is copied to the host, its masters are updated there, and the new values
are copied back: on a thread of its own, in the order in which units are used, so that the next
forward waits only for the units that it has come to (Ren et al., 2021, arXiv 2101.06840). While
one unit is updated, the next one's gradient is on its way down and the last one's values are on
their way up, on streams of their own where the device has streams.

Staging memory is that of the two largest units, reused; nothing else is kept of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.host import Copy, Lane, start_copy
from ..topology import Axis
from .flat import Flat
from .store import Store

OnHost = Mapping[Flat, Tensor]
Apply = Callable[[OnHost], None]
SLOTS = 2


@dataclass
class Turn:
    """A unit's way through the host: what is copied down, done, and copied up."""

    unit: int
    down: list[Copy]
    gradients: OnHost
    update: Apply
    rounded: list[tuple[Tensor, Tensor]]
    up: list[Copy]
    slot: int
    arrived: Any = None


class HostUpdates:
    """Keeps masters in a store, and updates them there.

    Args:
        flats: of each unit, those that are updated here.
        store: which has room for a ``master`` of each, reserved under ``master_name``.
        host: the axis on which copies are counted.
        device: where gradients come from and values go to.
    """

    def __init__(
        self, flats: Mapping[int, Sequence[Flat]], store: Store, host: Axis, device: torch.device
    ) -> None:
        self.flats, self.store, self._host, self._device = flats, store, host, device
        self._unit_of = {flat: unit for unit in flats for flat in flats[unit]}
        # A new thread is on device 0, where leaving a stream of another would open a context.
        enter = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="updates", initializer=enter)
        self._down, self._up = Lane(device), Lane(device)
        self._staged: list[tuple[Tensor, Tensor]] = []
        self._left: list[Any] = [None] * SLOTS

    def move_in(self) -> None:
        """Bring the masters into the store."""
        for unit, flats in self.flats.items():
            for at, flat in enumerate(flats):
                master = self.store.tensor(unit, master_name(at))
                flat.move_master(master, partial(self._publish, flat))
            self.store.release(unit)
        self.store.settle()
        self._staged = [
            (self._staging(lambda flat: flat.updated_grad), self._staging(_narrow))
            for _ in range(SLOTS)
        ]

    def run(self, updates: Mapping[int, Apply]) -> None:
        """Start the update of every unit, in unit order. Each flat says when its values are there.

        ``updates`` are called with the unit's gradients on the host, one on another's heels, on
        another thread. A unit without one has a turn too: other ranks update their part of it,
        and its gather must come in its place on all of them.
        """
        begun = self._down.now()
        turns = [
            self._turn(at, unit, updates.get(unit, _nothing)) for at, unit in enumerate(self.flats)
        ]
        for at, turn in enumerate(turns):
            after = turns[at + 1] if at + 1 < len(turns) else None
            made = self._worker.submit(self._make, turn, after, begun, first=at == 0)
            for flat in self.flats[turn.unit]:
                flat.coming = lambda made=made: self._up.follow(made.result())

    def _publish(self, flat: Flat) -> None:
        self._upward(flat, flat.master.to(flat.updated_values.dtype), "masters")()
        self.store.release(self._unit_of[flat])

    def _upward(self, flat: Flat, source: Tensor, tag: str) -> Copy:
        values = flat.updated_values
        if flat.bring is not None:  # the values are in the host's memory too
            return partial(_copy, source, values)
        return start_copy(source, values, self._host, tag=tag)

    def let_go(self, flat: Flat) -> None:
        """Its masters and their state have been looked at, and need not stay near."""
        self.store.let_go(self._unit_of[flat])

    def _turn(self, at: int, unit: int, update: Apply) -> Turn:
        """Counts the copies, in the step that they belong to."""
        slot, tag = at % SLOTS, f"unit {unit}"
        flats, (low, narrow) = self.flats[unit], self._staged[slot]
        gradients = _carve(low, flats, [flat.updated_grad for flat in flats])
        values = _carve(narrow, flats, [_narrow(flat) for flat in flats])
        down = [start_copy(f.updated_grad, gradients[f], self._host, tag=tag) for f in flats]
        up, rounded = [], []
        for flat in flats:
            source = flat.master
            if values[flat].numel():
                source = values[flat]
                rounded.append((flat.master, source))
            up.append(self._upward(flat, source, tag))
        return Turn(unit, down, gradients, update, rounded, up, slot)

    @torch.no_grad()
    def _make(self, turn: Turn, after: Turn | None, begun: Any, first: bool) -> Any:
        """On the thread of updates: returns what the device must wait for."""
        if first:
            self._fetch(turn, begun)
        if after is not None:
            self._fetch(after, begun)
        self._down.stay(turn.arrived)
        turn.update(turn.gradients)
        self._up.stay(self._left[turn.slot])
        for wide, narrow in turn.rounded:
            narrow.copy_(wide)
        self._left[turn.slot] = left = self._up.carry(turn.up, begun)
        self.store.release(turn.unit)
        return left

    def _fetch(self, turn: Turn, begun: Any) -> None:
        self.store.fetch(turn.unit)
        turn.arrived = self._down.carry(turn.down, begun)

    def _staging(self, of: Callable[[Flat], Tensor]) -> Tensor:
        sizes = [sum(of(flat).nbytes for flat in flats) for flats in self.flats.values()]
        pinned = self._device.type == "cuda"
        return torch.empty(max(sizes, default=0), dtype=torch.uint8, pin_memory=pinned)


def master_name(at: int) -> str:
    """Of a unit's flat, in the store."""
    return f"{at}/master"


def _narrow(flat: Flat) -> Tensor:
    """The values that are updated, where masters must be rounded to become them; else nothing."""
    values = flat.updated_values
    return values if values.dtype != flat.master.dtype else values[:0]


def _nothing(gradients: OnHost) -> None:
    """The update of what is padding here."""


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _carve(buffer: Tensor, flats: Sequence[Flat], like: Sequence[Tensor]) -> dict[Flat, Tensor]:
    """A tensor for each flat, as wide as its like, out of one buffer of bytes."""
    carved, start = {}, 0
    for flat, tensor in zip(flats, like, strict=True):
        stop = start + tensor.nbytes
        carved[flat] = buffer[start:stop].view(tensor.dtype)
        start = stop
    return carved
