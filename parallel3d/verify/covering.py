"""Few combinations of many choices in which any two choices still meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

Place = tuple[int, int]  # a dimension, and the place of a value in it


def pairwise(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of a value from each dimension: every two values of two dimensions are in a row.

    Greedy, and the same at every call: a row starts from the first pair that is in none yet, and
    each further dimension takes the value that adds most new pairs, the one used least among
    equals. Never fewer rows than the two longest dimensions have pairs, and seldom many more
    (D. Cohen et al. 1997, "The AETG system").

    >>> pairwise("ab", "xy", (1, 2))
    [('a', 'x', 1), ('a', 'y', 2), ('b', 'x', 2), ('b', 'y', 1)]
    """
    left = dict.fromkeys(_pairs(dimensions))  # in order, as a set is not
    used: dict[Place, int] = {}
    rows = []
    while left:
        row = dict(next(iter(left)))
        for dimension in range(len(dimensions)):
            if dimension not in row:
                places = [(dimension, value) for value in range(len(dimensions[dimension]))]
                row |= [
                    max(places, key=lambda place: (_gain(row, place, left), -used.get(place, 0)))
                ]
        places = sorted(row.items())
        for pair in combinations(places, 2):
            left.pop(pair, None)
        for place in places:
            used[place] = used.get(place, 0) + 1
        rows.append(tuple(dimensions[dimension][value] for dimension, value in places))
    return rows


def _pairs(dimensions: Sequence[Sequence[Any]]) -> Iterator[tuple[Place, Place]]:
    for a, b in combinations(range(len(dimensions)), 2):
        for at in range(len(dimensions[a])):
            yield from (((a, at), (b, other)) for other in range(len(dimensions[b])))


def _gain(row: dict[int, int], place: Place, left: dict[tuple[Place, Place], None]) -> int:
    """How many pairs that are left a value would make with those of a row."""
    return sum(tuple(sorted((other, place))) in left for other in row.items())
