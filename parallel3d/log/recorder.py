"""What a rank does in a step and when: an observer of the interpreter, cheap enough for every step.

On a CPU an action costs well under a microsecond, on a device that of two events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..pipeline.actions import COMPUTE, RECEIVES, SENDS, Action
from ..pipeline.runtime import Interpreter
from ..pipeline.simulate import Span
from .clock import Clock

MESSAGES = SENDS | RECEIVES
SHORTEST = 1e-5  # seconds: what is shorter is no waiting


class Recording(NamedTuple):
    """One step of one rank, in order, in seconds of a clock that all ranks share.

    ``computes`` are its computations; ``waits`` the time in which one of them (which names it)
    waited for what it needs; ``messages`` the time that the host took to post sends and receives.
    """

    computes: list[Span]
    waits: list[Span]
    messages: list[Span]


class Window(NamedTuple):
    """Nanoseconds: what a rank computed, from its first start to its last end."""

    busy: int = 0
    start: int = 0
    end: int = 0


class Recorder:
    """Remembers the training step that ran last.

    Args:
        clock: of what the rank computes on.
        offset: seconds to add for the clock that all ranks share (see ``clock.host_offset``).
    """

    def __init__(self, clock: Clock, offset: float = 0.0) -> None:
        self._clock, self._offset = clock, offset
        self._last: Any = None  # when what came before had ended
        self._began: Any = None
        self._rows: list[tuple[Action, Any, Any, Any]] = []  # action, last, began, ended

    @contextmanager
    def listening(self, interpreter: Interpreter) -> Iterator[None]:
        """Remember what is run inside, and forget what was before."""
        self._rows, self._last = [], None
        self._clock.start()
        interpreter.observers.append(self)
        try:
            yield
        finally:
            interpreter.observers.remove(self)

    def waits(self, action: Action) -> None:
        """The first action's turn is when the step begins."""
        if self._last is None:
            self._last = self._clock.mark()

    def begins(self, action: Action) -> None:
        """A computation starts."""
        self._began = self._clock.mark()

    def ends(self, action: Action) -> None:
        """A computation, or the host's part of a message, is done."""
        if action.op in COMPUTE:
            now = self._clock.mark()
            self._rows.append((action, self._last, self._began, now))
        elif self._clock.sees_messages and action.op in MESSAGES:
            now = self._clock.mark()
            self._rows.append((action, self._last, self._last, now))
        else:
            return
        self._last = now

    def read(self) -> Recording:
        """The step that ran last. On a device its computations must not be waited for any more."""
        computes, waits, messages = [], [], []
        for action, last, began, ended in self._times():
            if action.op in COMPUTE:
                computes.append(Span(action, began, ended))
                if began - last > SHORTEST:
                    waits.append(Span(action, last, began))
            else:
                messages.append(Span(action, began, ended))
        return Recording(computes, waits, messages)

    def window(self) -> Window:
        """What the rank's bubble is computed from."""
        spans = [
            (began, ended) for action, _, began, ended in self._times() if action.op in COMPUTE
        ]
        if not spans:
            return Window()
        busy = sum(ended - began for began, ended in spans)
        return Window(*(round(1e9 * seconds) for seconds in (busy, spans[0][0], spans[-1][1])))

    def _times(self) -> Iterator[tuple[Action, float, float, float]]:
        """The rows in seconds."""
        marks: Sequence[Any] = [mark for row in self._rows for mark in row[1:]]
        times = iter([self._offset + time for time in self._clock.read(marks)])
        for row in self._rows:
            yield row[0], next(times), next(times), next(times)
