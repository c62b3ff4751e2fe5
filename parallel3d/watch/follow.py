"""Where in its program a pipeline rank is: an observer of the interpreter."""

from __future__ import annotations

from collections.abc import Sequence

from ..pipeline.actions import SENDS, Action, Op
from ..topology import Topology
from .notes import Doing, Notes

# Where what an action needs comes from, or where what it makes goes to, in stages from its own.
AWAY = {
    Op.FORWARD: -1,
    Op.RECV_FORWARD: -1,
    Op.SEND_BACKWARD: -1,
    Op.BACKWARD: 1,
    Op.INPUT_GRAD: 1,
    Op.RECV_BACKWARD: 1,
    Op.SEND_FORWARD: 1,
}


class Follower:
    """Notes what the interpreter tells.

    Args:
        notes: this rank's.
        topology: who has which rank.
        rank_of_stage: the pipeline rank of every stage.
    """

    def __init__(self, notes: Notes, topology: Topology, rank_of_stage: Sequence[int]) -> None:
        self._notes, self._topology, self._rank_of_stage = notes, topology, rank_of_stage

    def waits(self, action: Action) -> None:
        """Its turn has come."""
        how = "hands over" if action.op in SENDS else "waits"
        self._notes.does(Doing(how, action, self.peer_of))

    def begins(self, action: Action) -> None:
        """A compute has its input."""
        self._notes.does(Doing("computes", action))

    def ends(self, action: Action) -> None:
        """After the last one comes the wait until all that was sent has gone."""
        self._notes.does(Doing("flushes", action, self.neighbours))

    def peer_of(self, action: Action) -> Sequence[int]:
        """The global rank that an action deals with, unless that is this rank or nobody."""
        return self._ranks([action.stage + AWAY[action.op]]) if action.op in AWAY else ()

    def neighbours(self, action: Action) -> Sequence[int]:
        """The global ranks that this one may have sent something to."""
        homes = enumerate(self._rank_of_stage)
        mine = [stage for stage, home in homes if home == self._topology.pp.rank]
        return self._ranks([stage + away for stage in mine for away in (-1, 1)])

    def _ranks(self, stages: Sequence[int]) -> Sequence[int]:
        topology = self._topology
        known = [self._rank_of_stage[s] for s in stages if 0 <= s < len(self._rank_of_stage)]
        others = {home for home in known if home != topology.pp.rank}
        return [topology.grid.rank(h, topology.dp.rank, topology.tp.rank) for h in sorted(others)]
