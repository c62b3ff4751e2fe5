from __future__ import annotations

import itertools

import pytest

from parallel3d.verify import LAYOUTS, Case, product
from parallel3d.verify.cases import part

EVERY = product(LAYOUTS, [0, 1], ["gpipe", "1f1b"], ["none", "full"])


def test_a_product_is_every_combination_once() -> None:
    assert len(EVERY) == len(set(EVERY)) == 8 * 2 * 2 * 2


def test_cases_of_a_layout_stand_together() -> None:
    grids = [case.grid for case in EVERY]
    changes = sum(a != b for a, b in itertools.pairwise(grids))
    assert changes == len(LAYOUTS) - 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 100])
def test_parts_are_everything_and_each_begins_its_families(count: int) -> None:
    parts = [part(EVERY, index, count) for index in range(1, count + 1)]
    assert set().union(*parts) == set(EVERY)
    for mine in parts:
        for family in {case.family for case in mine}:
            first = next(case for case in EVERY if case.family == family)
            assert next(case for case in mine if case.family == family) == first


def test_parts_share_nothing_but_first_cases_of_families() -> None:
    parts = [part(EVERY, index, 3) for index in range(1, 4)]
    firsts = {next(case for case in EVERY if case.family == f) for f in {c.family for c in EVERY}}
    for one, other in itertools.combinations(parts, 2):
        assert set(one) & set(other) <= firsts


def test_a_case_reads_as_arguments() -> None:
    (case,) = product(["2x1x2"])
    assert str(case) == "2x1x2 zero=1 schedule=1f1b recompute=none"
    assert case.family == Case(case.grid).family == (1, 2, False)
    assert str(case._replace(num_chunks=3)) == f"{case} num_chunks=3"
    (case,) = product(["1x2x1"], zero=[2])
    assert str(case) == "1x2x1 zero=2 reduce=each schedule=1f1b recompute=none"


def test_a_choice_that_a_stage_of_zero_does_not_have_makes_no_case() -> None:
    found = [(case.zero, case.reduce) for case in product(["1x2x1"], [0, 1, 2], reduce=["each"])]
    assert found == [(0, "last"), (1, "last"), (2, "each")]


def test_reducing_each_microbatch_is_a_family_of_its_own_where_something_is_reduced() -> None:
    both = product(["1x1x1", "1x2x1", "2x2x1"], [1, 2, 3], reduce=["each", "last"])
    families = {case.family for case in both}
    assert families == {(1, 1, False), (2, 1, False), (2, 1, True)}
    assert {case.zero for case in both if case.family[2]} == {2, 3}
