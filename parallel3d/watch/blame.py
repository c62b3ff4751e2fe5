"""Who waits for whom, from the ranks' words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from ..topology import AXES, Grid
from .notes import CLOSING, MAKING, OUTSIDE
from .word import Word


@dataclass(frozen=True)
class Account:
    """What is known of all ranks at one moment.

    ``words`` are the last ones of those that ever said one; ``answered`` who has said it in answer
    to the alarm; ``ended`` whose process is known to exist no more; ``time`` by this machine.
    """

    grid: Grid
    words: Mapping[int, Word]
    answered: Set[int]
    ended: Set[int]
    time: float

    @cached_property
    def edges(self) -> dict[int, list[int]]:
        """The ranks that each waits for."""
        return {rank: _waits_for(self, rank) for rank in range(self.grid.size)}


def members(grid: Grid, rank: int, group: str) -> Sequence[int]:
    """The global ranks of a group of ``rank``, by its key."""
    name, _, ranks = group.partition(" ")
    if ranks:
        return [int(each) for each in ranks.split(",")]
    if name not in AXES:
        return range(grid.size)
    here = dict(zip(AXES, grid.coordinates(rank), strict=True))
    return [grid.rank(**{**here, name: at}) for at in range(getattr(grid, name))]


def _waits_for(account: Account, rank: int) -> list[int]:
    """As its own word and those of the others tell; none for who has ended."""
    word = account.words.get(rank)
    if word is None or rank not in account.answered or word.left:
        return []
    if word.raised is not None and not word.lost:
        return []
    others = [other for other in range(account.grid.size) if other != rank]
    if word.phase == CLOSING:
        return [other for other in others if not _closes(account.words.get(other))]
    if word.phase == MAKING and not word.how:
        return [other for other in others if not _makes(account.words.get(other))]
    if word.how == "awaits":
        return sorted({other for group in word.joined for other in _behind(account, word, group)})
    if word.how == "joins" and word.call:
        return _behind(account, word, word.call.group, word.call.number)
    return list(word.peers)


def _behind(account: Account, word: Word, group: str, number: int | None = None) -> list[int]:
    """Members of a group that have not yet begun its collective of this number."""
    number = word.joined.get(group, 0) if number is None else number
    late = []
    for other in members(account.grid, word.rank, group):
        theirs = account.words.get(other)
        if other != word.rank and (theirs is None or theirs.joined.get(group, 0) < number):
            late.append(other)
    return late


def _makes(word: Word | None) -> bool:
    """Whether a rank has begun to make the engine, which all do together."""
    return word is not None and (word.left or word.phase != OUTSIDE)


def _closes(word: Word | None) -> bool:
    return word is not None and (word.left or word.phase == CLOSING)


def roots(account: Account, first: int) -> list[int]:
    """The ranks where the waiting ends, for that rank which noticed it first.

    Those that have ended or failed, if any; else the ones that others wait for and that wait for
    nobody; else, where ranks wait in a circle, that circle.
    """
    broken = [rank for rank in range(account.grid.size) if _broken(account, rank)]
    if broken:
        return broken
    chain, seen = [first], {first}
    for rank in chain:
        new = [other for other in account.edges[rank] if other not in seen]
        chain += new
        seen.update(new)
    ends = sorted(rank for rank in chain if not account.edges[rank])
    return ends or _circle(account, first)


def _broken(account: Account, rank: int) -> bool:
    word = account.words.get(rank)
    failed = word is not None and word.raised is not None and not word.lost
    return failed or rank in account.ended


def _circle(account: Account, rank: int) -> list[int]:
    """Ranks that wait for each other, reached from one."""
    path = [rank]
    while (rank := account.edges[rank][0]) not in path:
        path.append(rank)
    return path[path.index(rank) :]
