from __future__ import annotations

from itertools import combinations

import pytest

from parallel3d.pipeline.schedules import NAMES
from parallel3d.topology import Grid
from parallel3d.verify import Case
from parallel3d.verify.suites import CHUNKED, SCHEDULES, Choices, describe, full, num_stages, quick

CHOICES = Choices(model=("a", "b"))
STAGES = [(0, "last"), (1, "last"), (2, "each"), (2, "last"), (3, "each"), (3, "last")]


def test_full_is_every_combination_and_more_chunks_where_a_schedule_has_them() -> None:
    assert set(CHOICES.schedule) == {*NAMES, "auto"}
    work = full(CHOICES)
    assert list(work) == ["a", "b"] and work["a"] == work["b"]
    cases = work["a"]
    assert len(set(cases)) == len(cases)
    for layout in "2x1x1 2x2x1 2x1x2 4x1x1 2x2x2 4x2x1 1x1x1 1x2x1 1x1x2 1x2x2".split():
        for schedule in SCHEDULES:
            for zero, reduce in STAGES:
                for recompute in ("none", "full", "selective"):
                    case = Case(Grid.parse(layout), zero, schedule, recompute, reduce=reduce)
                    assert case in cases
    more = [case for case in cases if case.num_chunks]
    assert {(case.schedule, case.num_chunks) for case in more} == {
        (name, chunks) for name in ("interleaved", "looped-bfs") for chunks in (3, 4)
    }
    assert len(more) == 36 * len(STAGES)
    assert len(cases) == len(more) + 10 * len(SCHEDULES) * 3 * len(STAGES)


def test_what_is_given_narrows_both_suites() -> None:
    choices = CHOICES._replace(layouts=["2x1x1"], schedule=["1f1b", "interleaved"], zero=[0])
    for cases in full(choices).values():
        assert {case.schedule for case in cases} == {"1f1b", "interleaved"}
        assert {case.num_chunks for case in cases} == {None, 3, 4}
        assert {str(case.grid) for case in cases} == {"2x1x1"}
        assert {case.zero for case in cases} == {0}
    for cases in quick(choices).values():
        assert {case.schedule for case in cases} == {"1f1b", "interleaved"}
    given = choices._replace(schedule=["interleaved"], num_chunks=[2])
    assert {case.num_chunks for case in full(given)["a"]} == {2}


def test_quick_brings_every_two_choices_together() -> None:
    rows = [
        (model, case.grid, (case.zero, case.reduce), case.schedule, case.recompute)
        for model, cases in quick(CHOICES).items()
        for case in cases
    ]
    assert 0 <= len(rows) - len(CHOICES.layouts) * len(SCHEDULES) <= 5
    sizes = {0: 2, 1: len(CHOICES.layouts), 2: len(STAGES), 3: len(SCHEDULES), 4: 3}
    for a, b in combinations(sizes, 2):
        assert len({(row[a], row[b]) for row in rows}) == sizes[a] * sizes[b]


@pytest.mark.parametrize(
    ("case", "stages"),
    [
        (Case(Grid(4, 2, 1)), 4),
        (Case(Grid(4, 1, 1), schedule="zbv"), 8),
        (Case(Grid(1, 1, 2), schedule="interleaved"), 2),
        (Case(Grid(2, 1, 1), schedule="looped-bfs", num_chunks=4), 8),
    ],
)
def test_the_stages_that_a_case_cuts_a_model_into(case: Case, stages: int) -> None:
    assert num_stages(case) == stages


def test_a_suite_says_what_it_covers() -> None:
    told = describe("full", CHOICES)
    assert told.splitlines()[:3] == [
        "every combination of",
        "  model      a, b",
        f"  layouts    {', '.join(CHOICES.layouts)}",
    ]
    assert told.endswith("3 and 4 chunks on " + ", ".join(CHUNKED.layouts))
    assert describe("quick", CHOICES).startswith("every two choices meet of\n")
