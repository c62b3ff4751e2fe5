from __future__ import annotations

import itertools

import pytest

from parallel3d.verify import LAYOUTS, Case, product, quick
from parallel3d.verify.cases import part

FULL = product(LAYOUTS, [0, 1], ["gpipe", "1f1b"], ["none", "full"])


def test_quick_has_every_layout_and_every_choice_under_every_axis() -> None:
    cases = quick()
    assert {str(case.grid) for case in cases} == set(LAYOUTS)
    assert len(cases) == 2 * len(LAYOUTS)
    for axis in ("pp", "dp", "tp"):
        cut = [case for case in cases if getattr(case.grid, axis) > 1]
        assert {case.zero for case in cut} == {0, 1}, axis
        assert {case.schedule for case in cut} == {"gpipe", "1f1b"}, axis
        assert {case.recompute for case in cut} == {"none", "full"}, axis


def test_quick_has_each_family_under_more_than_one_layout_and_choice() -> None:
    for family in {case.family for case in quick()}:
        mine = [case for case in quick() if case.family == family]
        assert len({case.grid for case in mine}) == 2
        assert len({case[1:] for case in mine}) >= 2


def test_full_is_every_combination_once() -> None:
    assert len(FULL) == len(set(FULL)) == 8 * 2 * 2 * 2


def test_cases_of_a_layout_stand_together() -> None:
    grids = [case.grid for case in FULL]
    changes = sum(a != b for a, b in itertools.pairwise(grids))
    assert changes == len(LAYOUTS) - 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 100])
def test_parts_are_everything_and_each_begins_its_families(count: int) -> None:
    parts = [part(FULL, index, count) for index in range(1, count + 1)]
    assert set().union(*parts) == set(FULL)
    for mine in parts:
        for family in {case.family for case in mine}:
            first = next(case for case in FULL if case.family == family)
            assert next(case for case in mine if case.family == family) == first


def test_four_parts_of_full_share_nothing() -> None:
    assert sum(len(part(FULL, index, 4)) for index in range(1, 5)) == len(FULL)


def test_a_case_reads_as_arguments() -> None:
    (case,) = product(["2x1x2"])
    assert str(case) == "2x1x2 zero=1 schedule=1f1b recompute=none"
    assert case.family == Case(case.grid).family == (1, 2)
