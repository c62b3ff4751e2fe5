"""What the ranks tell each other in the store, under a prefix of their own.

[Note: whose store] Each rank has a connection of its own, for its watch's thread alone: the shared
one may be held for minutes by a main thread that waits in it. Nothing here waits for a key that may
not come, and the store is asked for a few keys per tick whatever the number of ranks.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from .word import Word

SECONDS = 10.0  # that the store may take to answer


class Alarm(NamedTuple):
    """Why all ranks are to end: ``stuck`` or ``lost``; ``rank`` noticed it first."""

    kind: str
    rank: int


class Report(NamedTuple):
    """The whole ``text``, the cause alone, the rank that prints it, and how many will read it."""

    text: str
    verdict: str
    printer: int
    readers: int


class Board:
    """One rank's view. Any call may raise what torch raises when the store is gone.

    Every rank must make its boards on a store in the same order.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        mine = store.clone()  # type: ignore[attr-defined]
        mine.set_timeout(timedelta(seconds=SECONDS))
        number = mine.add(f"watches/{rank}", 1)
        self._store = dist.PrefixStore(f"watch/{number}", mine)

    def tell(self, word: Word) -> None:
        """Replace this rank's word."""
        self._store.set(f"word/{self.rank}", word.dump())

    def words(self) -> dict[int, Word]:
        """The last word of each rank that has said one."""
        texts = {rank: self._get(f"word/{rank}") for rank in range(self.size)}
        return {rank: Word.load(text) for rank, text in texts.items() if text is not None}

    def ring(self, alarm: Alarm) -> Alarm:
        """Raise an alarm; returns the one that was raised first."""
        first = self._store.compare_set("alarm", "", json.dumps(alarm))
        return Alarm(*json.loads(first))

    def alarm(self) -> Alarm | None:
        """The alarm, once there is one."""
        text = self._get("alarm")
        return None if text is None else Alarm(*json.loads(text))

    def publish(self, report: Report) -> None:
        """Show the report to all."""
        self._store.set("report", json.dumps(report))

    def report(self) -> Report | None:
        """The report, once there is one."""
        text = self._get("report")
        return None if text is None else Report(*json.loads(text))

    def confirm(self) -> None:
        """This rank has read all it needs."""
        self._store.add("confirmed", 1)

    def confirmed(self) -> int:
        """How many have."""
        return self._store.add("confirmed", 0)

    def _get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None
