"""A rank's word: what it does, as it is told to the others."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from .frames import place_of
from .notes import Activity, Call, Notes


@dataclass(frozen=True)
class Word:
    """Less than a kilobyte as JSON.

    Args:
        rank: whose.
        step: the training step, from 1; 0 before the first.
        phase: of the program.
        age: seconds since the main thread was heard of.
        how, action, peers, call: as in ``notes.Doing``, with the peers' ranks.
        joined: collectives begun in each group.
        raised: the error that the main thread is raising.
        lost: whether that is a lost connection.
        at, user: the innermost Python frame, and the innermost in the user's own code.
        final: said in answer to an alarm, or when leaving.
        left: the rank has ended in good order.
        time: when said, by the clock of the machine.
        home, pid: the machine and the process.
    """

    rank: int
    step: int = 0
    phase: str = ""
    age: float = 0.0
    how: str = ""
    action: str = ""
    peers: tuple[int, ...] = ()
    call: Call | None = None
    joined: dict[str, int] = field(default_factory=dict)
    raised: str | None = None
    lost: bool = False
    at: str = ""
    user: str = ""
    final: bool = False
    left: bool = False
    time: float = 0.0
    home: str = ""
    pid: int = 0

    @classmethod
    def of(cls, rank: int, notes: Notes, *, final: bool = False, left: bool = False) -> Word:
        """What the notes of this process say now; a final word says where in the code, too."""
        activity, joined = notes.activity, dict(notes.joined)
        failure = activity.failure
        word = cls(
            rank,
            notes.step,
            activity.phase,
            time.monotonic() - activity.since,
            **_doing(activity),
            joined=joined,
            raised=failure.text if failure else None,
            lost=failure is not None and failure.lost,
            final=final or left,
            left=left and failure is None,
            time=time.time(),
            home=_home(),
            pid=os.getpid(),
        )
        place = failure.place if failure else place_of(notes.thread) if final else None
        return replace(word, at=place.at, user=place.user) if place else word

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str | bytes) -> Word:
        """What ``dump`` gave."""
        values = json.loads(text)
        call = values.pop("call")
        return cls(**{**values, "peers": tuple(values["peers"])}, call=call and Call(*call))

    def has_ended(self) -> bool:
        """Whether the process is known to exist no more: it must have been one of this machine."""
        if self.home != _home():
            return False
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return Path("/proc/self").exists()
        return status.rpartition(")")[2].split()[0] in ("Z", "X")


def _doing(activity: Activity) -> dict[str, Any]:
    doing = activity.doing
    if doing is None:
        return {}
    peers = doing.peers_of(doing.action) if doing.peers_of and doing.action else ()
    return {
        "how": doing.how,
        "action": str(doing.action or ""),
        "peers": tuple(peers),
        "call": doing.call,
    }


@cache
def _home() -> str:
    """This machine, as far as process identifiers are shared."""
    try:
        space = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        space = 0
    return f"{socket.gethostname()}/{space}"
