"""What units keep of a microbatch between forward and backward, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..topology import Axis
from .cut_inputs import CutInputs
from .offload import Host, Offloaded
from .repeated import Here, Put, Repeated
from .segment import Segment, Unit
from .tape import Tape


@dataclass(frozen=True)
class Activations:
    """The choice for every unit.

    Args:
        mode: ``none`` keeps the graph; ``full`` the input only, ``selective`` that and the results
            of matrix products, attention and collectives: the rest is run again in backward.
        every: of the units, those whose number it divides are repeated.
        tp: the axis that the units send on.
        cut: cuts the kept inputs over ``tp``; None to keep them whole.
        host: where all this is put meanwhile; None to keep it on the device.
    """

    mode: str = "none"
    every: int = 1
    tp: Axis = field(default_factory=Axis.single)
    cut: CutInputs | None = None
    host: Host | None = None

    def repeats(self, unit: Unit) -> bool:
        """Whether the unit's forward is run again."""
        return self.mode != "none" and unit.number % self.every == 0

    def segment(self, unit: Unit, x: Any, seed: int) -> Segment:
        """One microbatch of a unit."""
        if not self.repeats(unit):
            if self.host is None:
                return Segment(unit, x, seed)
            return Offloaded(unit, x, seed, self.host)
        put: Put = Here if self.host is None else self.host.put
        if self.cut is not None:
            put = self.cut.of(unit, put)
        tape = Tape((self.tp,)) if self.mode == "selective" else None
        return Repeated(unit, x, seed, tape, put)
