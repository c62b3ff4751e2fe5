"""Parameters' values: when they are gathered over the ranks, and how long they are kept.

``Whole`` keeps them all, and gathers what the optimizers have updated ahead of the next forward.
``Owned`` keeps the shards, and gathers a unit's parameters around their uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ..comm.collectives import Pending, start_all_gather
from .flat import Flat
from .residency import plan


class Values(Protocol):
    """Who sees to it that a unit finds its parameters."""

    def begin(self, uses: Sequence[int], training: bool, here: Sequence[bool]) -> None:
        """Of a program that uses these units, in order. Training changes the values at its end.

        Those that are not ``here`` are other ranks' uses, in which this one takes part.
        """

    def before(self, unit: int) -> None:
        """Called before each use of a unit: its parameters are there when this returns."""

    def end(self) -> None:
        """Of the program."""

    def publish(self) -> None:
        """After the optimizer has made new masters: bring them to where they are used."""

    def wait(self) -> None:
        """Until no gather is under way, so that masters may be written."""

    def settle(self) -> None:
        """Have all parameters there until the next program begins. Collective."""


class Whole:
    """Values that every rank keeps; ``flats`` are those of each unit that has some of its own."""

    def __init__(self, flats: Mapping[int, Sequence[Flat]]) -> None:
        self.flats = flats
        self._gathering: dict[int, list[Pending]] = {}

    def begin(self, uses: Sequence[int], training: bool, here: Sequence[bool]) -> None:
        """Nothing: gathers are under way since the update."""

    def before(self, unit: int) -> None:
        """Wait for the unit's update, if it is made elsewhere, and for its gathers."""
        for flat in self.flats.get(unit, ()):
            if flat.arrive():
                self._gather(flat, unit)
        for pending in self._gathering.pop(unit, ()):
            pending.wait()

    def end(self) -> None:
        """Nothing."""

    def publish(self) -> None:
        """Cast the masters, and from stage 1 on start gathering, unit by unit."""
        for unit in sorted(self.flats):
            for flat in self.flats[unit]:
                if flat.publish():
                    self._gather(flat, unit)

    def wait(self) -> None:
        """For every gather."""
        for unit in sorted(self.flats):
            self.before(unit)

    settle = wait

    def _gather(self, flat: Flat, unit: int) -> None:
        if flat.stage > 0:
            part = flat.updated_values
            pending = start_all_gather(part, flat.data, flat.axis, tag=f"unit {unit}")
            self._gathering.setdefault(unit, []).append(pending)


class Owned:
    """Values that are gathered around their uses.

    Args:
        needs: the flats that a unit's parameters lie in, of each unit.
        units: the unit that a flat is of, by which it is named.
        budget: bytes that may be gathered at once; more only for what one unit needs.

    Gathers are issued in the order of next use, so all ranks issue the same ones.
    """

    def __init__(
        self, needs: Mapping[int, Sequence[Flat]], units: Mapping[Flat, int], budget: int
    ) -> None:
        self.needs, self.units, self.budget = needs, units, budget
        self._plans: dict[tuple[bool, tuple[int, ...]], list[tuple[Flat, ...]]] = {}
        self._wanted: list[tuple[Flat, ...]] = []
        self._uses: Iterator[tuple[int, tuple[Flat, ...], bool]] = iter(())
        self._gathered: dict[Flat, Pending] = {}

    def begin(self, uses: Sequence[int], training: bool, here: Sequence[bool]) -> None:
        """Plan what is kept when."""
        key = training, tuple(uses)
        if key not in self._plans:
            order = [self.needs.get(unit, ()) for unit in uses]
            sizes = {flat: flat.nbytes for flat in self.units}
            self._plans[key] = plan(order, sizes, self.budget, () if training else order)
        self._wanted = self._plans[key]
        self._uses = zip(uses, self._wanted, here, strict=True)
        self._hide()

    def before(self, unit: int) -> None:
        """Release what is not needed soon, start to gather what is, and wait for the unit's own."""
        self._go_on()
        for flat in self.needs.get(unit, ()):
            self._gathered[flat].wait()
            flat.show()

    def end(self) -> None:
        """Gather what is left for others, and let nobody read or write what is thrown away."""
        self._go_on()
        self._hide()

    def _go_on(self) -> None:
        """To the next use that is here, or the end."""
        for unit, wanted, here in self._uses:
            self._want(wanted, self.needs.get(unit, ()))
            if here:
                return

    def _hide(self) -> None:
        for flat in self._gathered:
            flat.hide()

    def publish(self) -> None:
        """Cast the masters into the shards, drop what was gathered, start for the next program."""
        self._want(())
        for flat in self.units:
            flat.publish()
        self._want(self._wanted[0] if self._wanted else ())

    def wait(self) -> None:
        """For every gather, and every update that is made elsewhere."""
        for pending in self._gathered.values():
            pending.wait()
        for flat in self.units:
            flat.arrive()

    def settle(self) -> None:
        """Gather everything, within the budget or not."""
        self._want(tuple(self.units), tuple(self.units))
        self.wait()
        for flat in self._gathered:
            flat.show()

    def _want(self, wanted: Sequence[Flat], now: Sequence[Flat] = ()) -> None:
        """Gather these and no others; those that an update is still made of only if needed now."""
        for flat in [flat for flat in self._gathered if flat not in wanted]:
            self._gathered.pop(flat).wait()
            flat.release()
        for flat in wanted:
            if flat not in self._gathered and (flat.coming is None or flat in now):
                flat.arrive()
                self._gathered[flat] = flat.gather(f"unit {self.units[flat]}")
