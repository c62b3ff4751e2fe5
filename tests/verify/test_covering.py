from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from parallel3d.verify.covering import pairwise

SIZES = st.lists(st.integers(1, 7), min_size=2, max_size=6)


@given(SIZES)
def test_any_two_values_of_two_dimensions_meet_in_a_row(sizes: list[int]) -> None:
    rows = pairwise(*map(range, sizes))
    for a, b in combinations(range(len(sizes)), 2):
        met = {(row[a], row[b]) for row in rows}
        assert met == {(x, y) for x in range(sizes[a]) for y in range(sizes[b])}


@given(SIZES)
def test_no_row_is_in_vain_and_there_are_few(sizes: list[int]) -> None:
    rows = pairwise(*map(range, sizes))
    *_, second, longest = sorted(sizes)
    assert len(set(rows)) == len(rows) <= 2 * longest * second
    assert rows == pairwise(*map(range, sizes))


def test_where_two_dimensions_are_long_there_are_as_many_rows_as_pairs_of_them() -> None:
    assert len(pairwise(range(2), range(10), (0, 1), range(6), "ab")) == 60
