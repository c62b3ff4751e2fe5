"""The optimizer over what this rank updates: one flat tensor per (flat buffer, optimizer group)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ..zero.flat import ALIGNMENT, Flat, Slot
from ..zero.store import Room
from ..zero.updates import HostUpdates, master_name
from .bundle import (
    Bundle,
    Keeping,
    Span,
    State,
    Updated,
    rooms_of,
    state_name,
)
from .make import Make, Options, made_for_trial
from .schedule import factor_of


class Apart(NamedTuple):
    """Units that are updated one after another, each by a torch optimizer of its own.

    Args:
        flats: of each unit, those that are updated.
        dtype: in which the optimizer's state is kept between updates, None for the masters'.
        host: where masters and state live, and are updated; None for the device.
    """

    flats: Mapping[int, Sequence[Flat]]
    dtype: torch.dtype | None = None
    host: HostUpdates | None = None


class ShardedOptimizer:
    """A torch optimizer of this rank's shards, with groups numbered over the whole model.

    Args:
        make: called with parameter groups, as ``torch.optim.AdamW`` is; elementwise.
        flats: whose ``updated`` parts are to be updated.
        groups: options of every group of the whole model; a rank may hold nothing of some.
        lr_schedule: factor of each group's learning rate, of the number of updates made.
        apart: one unit at a time; None for everything in one call.

    Raises OSError where the state that it is to keep has no room on a disk.
    """

    def __init__(
        self,
        make: Make,
        flats: Sequence[Flat],
        groups: Sequence[Options],
        lr_schedule: Callable[[int], float] | None = None,
        apart: Apart | None = None,
    ) -> None:
        self.updates = 0
        self.lr_schedule = lr_schedule
        self._make, self._all_groups, self._apart = make, groups, apart
        host = None if apart is None else apart.host
        self._keeping = apart and Keeping(apart.dtype, None if host is None else host.store)
        of_unit = {0: flats} if apart is None else apart.flats
        spans = {unit: [s for flat in of_unit[unit] for s in _spans(flat)] for unit in of_unit}
        if host is not None:
            self._move_in(host, spans)
        self.bundles = {
            unit: Bundle(make, groups, spans[unit], unit, self._keeping)
            for unit in spans
            if spans[unit]
        }
        # A rank that holds nothing of the first group still reports its learning rate.
        first = made_for_trial(make, groups[0] if groups else {})
        self._first_lr = float(first.param_groups[0].get("lr", 0.0))

    @property
    def inner(self) -> torch.optim.Optimizer | None:
        """The torch optimizer of the first bundle, which is all where units are not apart."""
        return next((bundle.inner for bundle in self.bundles.values()), None)

    @property
    def lr(self) -> float:
        """Learning rate of the model's first group in the next update."""
        return self._first_lr * self._factor()

    def step(self) -> None:
        """One update at the learning rate of the schedule; on the host it goes on meanwhile."""
        factor = self._factor()
        if self._apart is not None and self._apart.host is not None:
            bundles = self.bundles.items()
            self._apart.host.run({u: partial(b.step, b.lrs(factor)) for u, b in bundles})
        else:
            for bundle in self.bundles.values():
                bundle.step(bundle.lrs(factor))
        self.updates += 1

    def parts(self) -> list[Updated]:
        """Everything this rank updates, bundle by bundle, in group order."""
        return [part for bundle in self.bundles.values() for part in bundle.parts]

    def states(self) -> list[State]:
        """The optimizer's state of each of ``parts()``, as it is kept; filled by the first step."""
        return [b.state(part) for b in self.bundles.values() for part in b.parts]

    def blank_states(self) -> list[State]:
        """States such as a first step makes, to be written over.

        Nothing of ours is touched by making them; where it lives in a store, by writing to them.
        """
        return [state for b in self.bundles.values() for state in b.blank_states()]

    def predicted_bytes(self) -> int:
        """Of the state that a first step will make."""
        rooms = [
            room
            for b in self.bundles.values()
            for each in self._rooms(b.spans)
            for room in each.values()
        ]
        return sum(room.nbytes for room in rooms)

    def sent(self) -> int:
        """Bytes that a step sends over ``dp``: none, each element is for itself."""
        return 0

    def counters(self) -> dict[str, State]:
        """Numbers that the optimizer keeps in its groups, such as a count of steps, by group."""
        found: dict[str, State] = {}
        for bundle in self.bundles.values():
            found |= bundle.counters()
        return found

    def restart(self, states: Sequence[State], updates: int, counters: Mapping[str, State]) -> None:
        """Go on from these states and counters, or from none, after so many updates."""
        parts = self.parts()[: len(states)]
        mine = {part.parameter: state for part, state in zip(parts, states, strict=True)}
        for bundle in self.bundles.values():
            bundle.restart(mine, counters)
        self.updates = updates

    def _move_in(self, host: HostUpdates, spans: Mapping[int, Sequence[Span]]) -> None:
        for unit, flats in host.flats.items():
            rooms = {
                master_name(at): Room(len(flat.master), flat.master.dtype)
                for at, flat in enumerate(flats)
            }
            in_order = sorted(spans[unit], key=lambda span: span.group)
            for at, each in enumerate(self._rooms(in_order)):
                rooms |= {state_name(at, name): room for name, room in each.items()}
            host.store.reserve(unit, rooms)
        host.move_in()

    def _rooms(self, spans: Sequence[Span]) -> list[dict[str, Room]]:
        keeping = self._keeping or Keeping()
        return rooms_of(self._make, self._all_groups, spans, keeping)

    def _factor(self) -> float:
        return factor_of(self.lr_schedule, self.updates)


def _spans(flat: Flat) -> list[Span]:
    """Each optimizer group's part in what is updated of the flat buffer here.

    Groups are contiguous; each runs up to the next one's start, so borders stay multiples of 64.
    """
    low, high = flat.updated
    starts: list[tuple[int, int]] = []
    for slot in flat.slots:
        if not starts or starts[-1][0] != slot.held.group:
            starts.append((slot.held.group, slot.start))
    ends = [start for _, start in starts[1:]] + [_end(flat.slots)]
    return [
        Span(group, flat, max(start, low), min(end, high))
        for (group, start), end in zip(starts, ends, strict=True)
        if max(start, low) < min(end, high)
    ]


def _end(slots: list[Slot]) -> int:
    return -(-slots[-1].stop // ALIGNMENT) * ALIGNMENT if slots else 0
