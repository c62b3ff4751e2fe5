"""Moments of a step: of the host, or of the device, on one scale for all ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from ..comm.collectives import all_gather_objects, barrier
from ..topology import Axis

ROUNDS = 15


class Clock(Protocol):
    """Takes marks while a step runs, and reads them when it is over.

    ``sees_messages``: whether work on a message is work of what is measured. On a device it is not:
    there the stream only waits.
    """

    sees_messages: bool

    def start(self) -> None:
        """A step begins: the marks of the last one are forgotten."""

    def mark(self) -> Any:
        """This moment."""

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Marks in seconds of the host's monotonic clock."""


def clock_of(device: torch.device) -> Clock:
    """The clock of what a rank computes on."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


class HostClock:
    """``time.perf_counter``, which on one machine is the same for all processes."""

    sees_messages = True

    def __init__(self) -> None:
        self.mark = time.perf_counter

    def start(self) -> None:
        """Nothing to prepare."""

    def read(self, marks: Sequence[float]) -> list[float]:
        """They are seconds already."""
        return list(marks)


class DeviceClock:
    """Events on the current stream of a CUDA device, read when they have passed.

    The event that they count from lies on a stream of its own, which has nothing else to do, so
    that it passes as the host takes the time beside it, to some microseconds; no work is waited
    for. Events are used again in the next step.
    """

    sees_messages = False

    def __init__(self, device: torch.device) -> None:
        self._aside = torch.cuda.Stream(device)
        self._first = torch.cuda.Event(enable_timing=True)
        self._events: list[torch.cuda.Event] = []
        self._used, self._began = 0, 0.0

    def start(self) -> None:
        """The zero of this step."""
        self._used = 0
        self._first.record(self._aside)
        self._began = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """An event behind all that was launched."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Waits for the last of them, which after a training step has passed long ago."""
        if marks:
            marks[-1].synchronize()
        return [self._began + self._first.elapsed_time(mark) / 1e3 for mark in marks]


def host_offset(world: Axis, host: str | None = None) -> float:
    """Seconds to add to this host's monotonic clock to have that of rank 0's. Collective.

    0 on the host of rank 0. Elsewhere the clocks are compared as all ranks leave a barrier, several
    times, and the median counts: as exact as a barrier ends together, which is tens of
    microseconds in one network. ``host``: who shares a clock, by default by the running kernel.
    """
    hosts = all_gather_objects(host or _kernel(), world)
    if len(set(hosts)) == 1:
        return 0.0
    left = []
    for _ in range(ROUNDS):
        barrier(world)
        left.append(time.perf_counter())
    return offset(all_gather_objects(left, world), hosts, world.rank)


def offset(left: Sequence[Sequence[float]], hosts: Sequence[str], rank: int) -> float:
    """What ``host_offset`` gives, from when each rank left each barrier; one for all of a host."""
    here = hosts.index(hosts[rank])
    if here == hosts.index(hosts[0]):
        return 0.0
    return median(zero - mine for zero, mine in zip(left[0], left[here], strict=True))


def _kernel() -> str:
    """A name that two processes share if and only if they share a monotonic clock."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
