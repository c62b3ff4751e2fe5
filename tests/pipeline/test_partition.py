from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.pipeline.memory import in_flight
from parallel3d.pipeline.partition import partition
from parallel3d.pipeline.schedules import build


def _sizes(stages: list[tuple[int, int]]) -> list[int]:
    return [stop - start for start, stop in stages]


def _sums(costs: list[int], stages: list[tuple[int, int]]) -> list[int]:
    return [sum(costs[start:stop]) for start, stop in stages]


@pytest.mark.report("pytorch/torchtitan#963")
def test_no_unit_is_lost_when_units_do_not_divide_by_stages() -> None:
    assert _sizes(partition([1] * 7, 3)) == [3, 2, 2]
    for num_units in range(1, 10):
        for num_stages in range(1, min(4, num_units) + 1):
            for method in ("uniform", "parameters"):
                stages = partition([5] * num_units, num_stages, method)
                units = [unit for start, stop in stages for unit in range(start, stop)]
                assert units == list(range(num_units))
                assert max(_sizes(stages)) - min(_sizes(stages)) <= 1


@pytest.mark.report("deepspeedai/DeepSpeed#5078")
@pytest.mark.parametrize("method", ["uniform", "parameters"])
def test_every_stage_has_a_weighted_unit(method: str) -> None:
    costs = [0] * 3 + [7] * 26 + [0] * 2
    stages = partition(costs, 10, method)
    assert [start for start, _ in stages] == [0, *[stop for _, stop in stages[:-1]]]
    assert stages[-1][1] == 31
    assert set(_sums(costs, stages)) == {14, 21}


@pytest.mark.report("deepspeedai/DeepSpeed#5078")
@pytest.mark.parametrize("method", ["uniform", "parameters", [1, 2]])
def test_fewer_units_than_stages_are_refused_with_both_numbers(method: str | list[int]) -> None:
    with pytest.raises(ValueError, match=r"the model has 2 units, too few for 3 stages"):
        partition([4, 4], 3, method)


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    num_stages=st.integers(1, 5),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_parameters_finds_the_least_maximum_of_all_cuts(costs: list[int], num_stages: int) -> None:
    if len(costs) < num_stages:
        return
    stages = partition(costs, num_stages)
    assert len(stages) == num_stages
    assert all(stop > start for start, stop in stages)
    every = [
        _sums(costs, list(pairwise([0, *cuts, len(costs)])))
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
    ]
    if sum(cost > 0 for cost in costs) >= num_stages:
        every = [sums for sums in every if min(sums) > 0]
        assert min(_sums(costs, stages)) > 0
    assert _unevenness(_sums(costs, stages)) == min(map(_unevenness, every))


def _unevenness(sums: list[int]) -> tuple[int, int]:
    return max(sums), sum(cost * cost for cost in sums)


def test_parameters_gives_heavy_ends_fewer_units_and_uniform_does_not() -> None:
    costs = [6, 1, 1, 1, 1, 1, 1, 6]
    assert _sizes(partition(costs, 4)) == [1, 3, 3, 1]
    assert _sizes(partition(costs, 4, "uniform")) == [2, 2, 2, 2]


def test_the_least_maximum_comes_before_an_even_spread() -> None:
    costs = [1, 5, 2, 3]
    assert _sums(costs, partition(costs, 3)) == [1, 5, 5]  # 6, 2, 3 has the smaller squares


def test_a_weightless_unit_stays_with_the_weighted_one_before_it() -> None:
    linear_relu = [8, 0, 8, 0, 8, 0, 8, 0]
    assert partition(linear_relu, 2) == [(0, 4), (4, 8)]
    assert partition([0, *linear_relu], 4) == [(0, 3), (3, 5), (5, 7), (7, 9)]


def test_more_stages_than_weighted_units_still_leave_none_empty() -> None:
    assert partition([1, 0, 0], 3) == [(0, 1), (1, 2), (2, 3)]
    assert _sizes(partition([0, 0, 0, 0], 2)) in ([3, 1], [2, 2], [1, 3])


def test_costs_may_be_floats() -> None:
    assert partition([0.1] * 6 + [0.3], 3) == [(0, 3), (3, 6), (6, 7)]


def test_a_list_is_the_first_unit_of_each_stage_but_the_first() -> None:
    assert partition([1] * 8, 3, [2, 3]) == [(0, 2), (2, 3), (3, 8)]
    assert partition([1] * 8, 1, []) == [(0, 8)]


@pytest.mark.parametrize("cuts", [[2], [3, 2], [2, 2], [0, 4], [4, 8], [-1, 4], [1, 2, 3]])
def test_cuts_that_leave_a_stage_empty_or_miss_one_are_refused(cuts: list[int]) -> None:
    with pytest.raises(ValueError, match=r"for 3 stages of 8 units: give 2 ascending numbers"):
        partition([1] * 8, 3, cuts)


def test_unknown_methods_stages_and_costs_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"'even' is not a way to cut: .* uniform, parameters, flops"
    ):
        partition([1, 1], 2, "even")
    with pytest.raises(ValueError, match="0 stages"):
        partition([1, 1], 0)
    with pytest.raises(ValueError, match="a unit costs -1"):
        partition([1, -1], 2)


def test_flops_and_measured_times_are_cut_as_parameters_are() -> None:
    costs = [6, 1, 0, 1, 1, 0.5, 1, 6]
    for method in ("flops", "measure"):
        assert partition(costs, 4, method) == partition(costs, 4, "parameters")


@given(
    units=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=8),
    kept=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    limit=st.integers(0, 60),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_memory_limit_leaves_the_least_maximum_of_the_cuts_within_it(
    units: list[tuple[int, int]], kept: list[int], limit: int
) -> None:
    costs, saved = [cost + 1 for cost, _ in units], [bytes_ for _, bytes_ in units]
    if len(units) < len(kept):
        return
    cuts = (
        list(pairwise([0, *inner, len(units)]))
        for inner in combinations(range(1, len(units)), len(kept) - 1)
    )
    within = [cut for cut in cuts if max(_bytes(saved, cut, kept)) <= limit]
    if within:
        found = partition(costs, len(kept), "measure", memory=saved, in_flight=kept, limit=limit)
        assert max(_bytes(saved, found, kept)) <= limit
        least = min(_unevenness(_sums(costs, cut)) for cut in within)
        assert _unevenness(_sums(costs, found)) == least
    else:
        with pytest.raises(ValueError, match=f"pipeline.memory_limit = {limit} bytes"):
            partition(costs, len(kept), "measure", memory=saved, in_flight=kept, limit=limit)


def _bytes(saved: list[int], cut: list[tuple[int, int]], kept: list[int]) -> list[int]:
    return [each * total for each, total in zip(kept, _sums(saved, cut), strict=True)]


def test_a_limit_that_no_cut_is_within_names_the_least_that_one_is() -> None:
    options = {"memory": [4, 4, 4, 4], "in_flight": [2, 1]}
    with pytest.raises(ValueError, match="memory_limit = 11 bytes .* keeps less than 12: raise"):
        partition([1] * 4, 2, limit=11, **options)
    assert _sizes(partition([1] * 4, 2, limit=12, **options)) == [1, 3]
    assert _sizes(partition([1] * 4, 2, limit=16, **options)) == [2, 2]
    assert _sizes(partition([1] * 4, 2, limit=None, **options)) == [2, 2]


@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("interleaved", 3), ("zbv", 2)])
def test_stages_of_one_rank_share_its_limit(name: str, chunks: int) -> None:
    schedule = build(name, 2, 8, chunks)
    home, kept = schedule.rank_of_stage, in_flight(schedule.program)
    costs, saved = [1] * 12, [1, 9, 1, 1, 1, 1, 5, 1, 1, 1, 1, 1]
    options = {"memory": saved, "in_flight": kept, "rank_of_stage": home}
    with pytest.raises(ValueError, match="no cut of the model keeps less than") as error:
        partition(costs, len(home), limit=1, **options)
    least = float(str(error.value).partition("less than ")[2].partition(":")[0])
    for limit in (least, 1.2 * least, 2 * least):
        used = [0.0] * 2
        found = partition(costs, len(home), limit=limit, **options)
        for stage, bytes_ in enumerate(_bytes(saved, found, kept)):
            used[home[stage]] += bytes_
        assert max(used) <= limit
    assert max(_sizes(found)) == 12 // len(home)  # with room enough the limit changes nothing


def test_stages_in_flight_are_counted_each_for_itself() -> None:
    assert in_flight(build("1f1b", 4, 8).program) == [4, 3, 2, 1]
    assert in_flight(build("zb-h1", 4, 8).program) == [4, 4, 4, 4]
    assert in_flight(build("gpipe", 2, 5).program) == [5, 5]
    assert in_flight(build("zbv", 2, 8).program) == [4, 3, 2, 1]


def test_cuts_are_whole_numbers() -> None:
    with pytest.raises(ValueError, match=r"partition = \[2.5\]: cuts are numbers of units"):
        partition([1.0] * 4, 2, [2.5])  # type: ignore[list-item]
