"""What was sent on which axis, and when it was issued and waited for."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import NamedTuple

from ..topology import Axis


class Event(NamedTuple):
    """One moment in the life of a communication on ``axis``, as this rank sees it.

    ``phase`` is ``issue``, ``block`` (from here the host may stand still) or ``wait`` (it is
    over). ``bytes`` is what this rank sends for it (0 but for an ``issue``); ``time`` in seconds;
    ``ranks`` are those of the axis.
    """

    axis: str
    kind: str
    tag: str
    phase: str
    bytes: int
    time: float
    ranks: tuple[int, ...] = ()


class Ledger:
    """Collects the events of the axes it is attached to.

    ``bytes()`` is the sum sent by this rank per axis since ``reset``; ``trace`` what was issued and
    waited for, in order, kept only while ``tracing`` is set, since it grows.
    """

    def __init__(self) -> None:
        self.tracing = False
        self.trace: list[Event] = []
        self._bytes: dict[str, int] = defaultdict(int)

    def attach(self, *axes: Axis) -> None:
        """Hear every event of these axes from now on."""
        for axis in axes:
            axis.observers.append(self._hear)

    def detach(self, *axes: Axis) -> None:
        """Hear these axes no more."""
        for axis in axes:
            axis.observers.remove(self._hear)

    def bytes(self) -> dict[str, int]:
        """Bytes this rank has sent since the last reset, by axis name."""
        return dict(self._bytes)

    def reset(self) -> None:
        """Forget what was counted and traced."""
        self._bytes.clear()
        self.trace.clear()

    def _hear(self, event: Event) -> None:
        self._bytes[event.axis] += event.bytes
        if self.tracing and event.phase != "block":
            self.trace.append(event)


def record(axis: Axis, kind: str, tag: str, phase: str, sent: int = 0) -> None:
    """Tell the axis's observers."""
    if axis.observers:
        event = Event(axis.name, kind, tag, phase, sent, time.perf_counter(), axis.ranks)
        for observer in axis.observers:
            observer(event)
