"""A run that is asked to stop goes on to the next step border, saves, and ends."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

import torch

from ..comm.collectives import all_reduce
from ..topology import Axis

AGAIN = 2.0
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Takes SIGINT, SIGTERM and SIGUSR1, as a context manager, and only remembers them.

    Nothing is interrupted: the loop asks `agreed` at each step border. A second signal changes
    nothing either, as launchers pass on what a terminal has sent already; but a SIGINT that comes
    ``AGAIN`` seconds or more after the first is somebody who cannot wait: KeyboardInterrupt. (A
    save that it meets leaves no half a checkpoint.)
    """

    def __init__(self) -> None:
        self._received = dict.fromkeys(HANDLED, False)
        self._agreed = dict.fromkeys(HANDLED, False)
        self._before: dict[signal.Signals, Any] = {}
        self._first: dict[int, float] = {}

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._receive) for number in HANDLED}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def requested(self) -> bool:
        """Whether a signal has come, to any process, as of the last `agreed`."""
        return any(self._agreed.values())

    @property
    def requeue(self) -> bool:
        """Whether SIGUSR1 was among them: the scheduler's time is up, and the job is to go on."""
        return self._agreed[signal.SIGUSR1]

    def agreed(self, world: Axis) -> bool:
        """Whether any rank has been asked to stop: the same answer on all. Collective.

        Moves   three numbers, an all-reduce over the world (on the host).
        """
        mine = torch.tensor([float(self._received[number]) for number in HANDLED])
        everywhere = all_reduce(mine, world, op="max", tag="stop").tolist()
        # Apart from what is received: a signal may come during the all-reduce, for the next time.
        self._agreed = {n: bool(any_) for n, any_ in zip(HANDLED, everywhere, strict=True)}
        return self.requested

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT and now - self._first.setdefault(number, now) >= AGAIN:
            raise KeyboardInterrupt
        self._received[signal.Signals(number)] = True
