from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.checkpoint.cover import covers_once, meetings
from parallel3d.placement import Rectangle
from tests.checkpoint.cuttings import cut_at_random

SIDE = 4
PINWHEEL = [(0, 0, 1, 2), (0, 2, 2, 1), (2, 1, 1, 2), (1, 0, 2, 1), (1, 1, 1, 1)]

rectangle = st.builds(
    Rectangle,
    st.integers(0, SIDE - 1),
    st.integers(0, SIDE - 1),
    st.integers(0, SIDE),
    st.integers(0, SIDE),
)


def cells(place: Rectangle) -> set[tuple[int, int]]:
    row, col, rows, cols = place
    return {(r, c) for r in range(row, row + rows) for c in range(col, col + cols)}


@settings(max_examples=200, deadline=None)
@given(st.lists(rectangle, max_size=5))
def test_covers_once_agrees_with_counting_cells(places: list[Rectangle]) -> None:
    counted = sorted(cell for place in places for cell in cells(place))
    assert covers_once((SIDE, SIDE), places) == (counted == sorted(cells(Rectangle(0, 0, 4, 4))))


@pytest.mark.parametrize("seed", range(20))
def test_every_cutting_covers_once_until_a_part_is_lost_doubled_or_moved(seed: int) -> None:
    rng = random.Random(seed)
    places = cut_at_random(rng, Rectangle(0, 0, 5, 7))
    assert covers_once((5, 7), places)
    victim = places.pop(rng.randrange(len(places)))
    assert not covers_once((5, 7), places)
    assert not covers_once((5, 7), [*places, victim, victim])
    assert not covers_once((5, 7), [*places, victim._replace(row=victim.row + 1)])


def test_a_cutting_that_no_straight_line_makes_covers_once() -> None:
    assert covers_once((3, 3), [Rectangle(*place) for place in PINWHEEL])


@pytest.mark.parametrize("view", [(0, 3), (3, 0), (0, 0)])
def test_nothing_covers_an_empty_view(view: tuple[int, int]) -> None:
    assert covers_once(view, []) and covers_once(view, [Rectangle(0, 0, 0, 0)])
    assert not covers_once((1, 1), [])


@settings(max_examples=200, deadline=None)
@given(rectangle, st.lists(rectangle, max_size=5))
def test_meetings_are_the_shared_cells(place: Rectangle, others: list[Rectangle]) -> None:
    array = np.array(others, dtype=np.int64).reshape(-1, 4)
    found = {index: cells(part) for index, part in meetings(place, array)}
    shared = {index: cells(place) & cells(other) for index, other in enumerate(others)}
    assert found == {index: part for index, part in shared.items() if part}
