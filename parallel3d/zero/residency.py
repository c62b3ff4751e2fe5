"""What is kept gathered between its uses, within a budget of bytes. On paper: no torch.

A program says in which order parameters are used. At each use, those that are used soonest are
kept or fetched, as many as the budget holds: so a use finds its parameters on their way already,
and what makes room is what is needed last (L. Belady 1966, "A study of replacement algorithms").
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)


class Traffic(NamedTuple):
    """Of one pass over a plan: how many pieces are gathered, their bytes, and the most at once."""

    gathers: int
    bytes: int
    peak: int


def plan(
    uses: Sequence[Sequence[T]],
    sizes: Mapping[T, int],
    budget: int,
    then: Sequence[Sequence[T]] = (),
) -> list[tuple[T, ...]]:
    """For each use what is to be there during it, in the order of next use: its own pieces first.

    Those are there whatever they take; others as far as all fit in ``budget`` bytes, in order,
    without a gap. ``then`` are uses that will follow these.

    >>> plan([("a",), ("b",), ("c",), ("b",)], {"a": 4, "b": 4, "c": 4}, budget=8)
    [('a', 'b'), ('b', 'c'), ('c', 'b'), ('b',)]
    """
    wanted: list[tuple[T, ...]] = []
    coming: list[T] = []  # all that is used from here on, in the order of next use
    for pieces in reversed([*uses, *then]):
        own = list(dict.fromkeys(pieces))
        coming = own + [piece for piece in coming if piece not in own]
        room, count = budget, 0
        for piece in coming:
            room -= sizes[piece]
            if room < 0 and count >= len(own):
                break
            count += 1
        wanted.append(tuple(coming[:count]))
    wanted.reverse()
    return wanted[: len(uses)]


def traffic(wanted: Sequence[Sequence[T]], sizes: Mapping[T, int]) -> Traffic:
    """What a plan costs that starts with nothing gathered.

    >>> traffic(plan([("a",), ("b",), ("a",)], {"a": 4, "b": 2}, 4), {"a": 4, "b": 2})
    Traffic(gathers=3, bytes=10, peak=4)
    """
    there: set[T] = set()
    gathers = moved = peak = 0
    for pieces in wanted:
        new = set(pieces) - there
        there = set(pieces)
        gathers += len(new)
        moved += sum(sizes[piece] for piece in new)
        peak = max(peak, sum(sizes[piece] for piece in there))
    return Traffic(gathers, moved, peak)
