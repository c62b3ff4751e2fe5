"""What the main thread notes of its doings: plain attributes, no lock, nothing sent."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..comm.ledger import Event
from ..pipeline.actions import Action
from .frames import Place, place_of_error

OUTSIDE = "the caller's code"
MAKING = "the making of the engine"
CLOSING = "the end, which all ranks reach together"


class Call(NamedTuple):
    """A collective: its group's key, what it is, and its number among those of the group."""

    group: str
    kind: str
    tag: str
    number: int

    @property
    def name(self) -> str:
        """As the report spells it."""
        return f"{self.kind} '{self.tag}'" if self.tag else self.kind


class Doing(NamedTuple):
    """One thing inside a phase.

    ``how`` is ``waits``, ``computes`` or ``hands over`` (an action), ``flushes`` (after one),
    ``joins`` (a collective), or ``awaits`` (the device). ``peers_of`` gives the global ranks that
    an action deals with.
    """

    how: str
    action: Action | None = None
    peers_of: Callable[[Action], Sequence[int]] | None = None
    call: Call | None = None


class Failure(NamedTuple):
    """An error on its way up: what it says, where it came from, and if a connection was lost."""

    text: str
    place: Place
    lost: bool


class Activity(NamedTuple):
    """``since`` is when the main thread was last heard of, by ``time.monotonic``."""

    since: float
    phase: str
    doing: Doing | None = None
    failure: Failure | None = None


class Notes:
    """The main thread writes, the watch's thread reads.

    Args:
        groups: keys of the groups that every rank can tell the members of, by name and ranks.

    Attributes:
        step: the training step, from 1.
        activity: what is done now; replaced whole.
        joined: collectives begun in each group, by its key.
        thread: identifier of the thread that notes.
    """

    def __init__(self, groups: Mapping[tuple[str, tuple[int, ...]], str]) -> None:
        self._groups = groups
        self.step = 0
        self.activity = Activity(time.monotonic(), OUTSIDE)
        self.joined: dict[str, int] = {}
        self.thread = threading.get_ident()
        self._begun: dict[tuple[str, str, str], deque[int]] = defaultdict(deque)
        self._inside: Doing | None = None  # what a collective is a part of

    def enters(self, phase: str) -> str:
        """Another phase begins; returns the one before."""
        before, self.thread = self.activity.phase, threading.get_ident()
        self._inside = None
        self.activity = Activity(time.monotonic(), phase)
        return before

    def does(self, doing: Doing | None) -> None:
        """Something else in the same phase."""
        self._inside = doing
        self.activity = Activity(time.monotonic(), self.activity.phase, doing)

    def fails(self, error: BaseException, lost: bool) -> None:
        """An error is on its way up; ``lost`` says that it is a lost connection."""
        text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        failure = Failure(text, place_of_error(error), lost)
        self.activity = self.activity._replace(since=time.monotonic(), failure=failure)
        self._begun.clear()

    def hears(self, event: Event) -> None:
        """A collective is begun, waited for, or done. Messages are the pipeline's to tell."""
        if event.kind in ("send", "receive"):
            return
        axis, kind, tag, *_, ranks = event
        group = self._groups.get((axis, ranks)) or f"{axis} {','.join(map(str, ranks))}"
        key, doing = (group, kind, tag), self._inside
        if event.phase == "issue":
            self.joined[group] = number = self.joined.get(group, 0) + 1
            self._begun[key].append(number)
        elif event.phase == "block":
            number = self._begun[key][0] if self._begun[key] else self.joined.get(group, 0)
            doing = Doing("joins", call=Call(*key, number))
        elif self._begun[key]:
            self._begun[key].popleft()
        self.activity = Activity(time.monotonic(), self.activity.phase, doing)
