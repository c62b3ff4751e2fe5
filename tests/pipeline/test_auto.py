from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.pipeline.auto import choose
from parallel3d.pipeline.costs import UnitCosts, stage_costs
from parallel3d.pipeline.partition import partition
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import NAMES, build
from parallel3d.pipeline.simulate import Timeline, simulate, simulate_costs
from tests.pipeline.paper_cases import alike_units, unlike_units

EQUAL = [UnitCosts(1, 1, 1, 100, 100, 0)] * 8


def _named(units: list[UnitCosts], p: int, m: int, comm: float) -> Iterator[tuple[str, Timeline]]:
    """Every named schedule on the most even cut by time."""
    for name in NAMES:
        for v in (2, 3, 4) if name in ("interleaved", "looped-bfs") else (None,):
            schedule = build(name, p, m, v)
            if len(schedule.rank_of_stage) <= len(units):
                times = [sum(unit[:3]) for unit in units]
                cuts = partition(times, len(schedule.rank_of_stage))
                yield name, simulate_costs(schedule.program, stage_costs(units, cuts, comm))


@given(
    data=st.data(),
    p=st.integers(1, 4),
    extra=st.integers(0, 12),
    m=st.integers(1, 12),
    comm=st.sampled_from([0.0, 0.1, 1.0]),
    room=st.floats(0.3, 3) | st.none(),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_it_is_never_slower_than_a_named_schedule_within_the_limit(
    data: st.DataObject, p: int, extra: int, m: int, comm: float, room: float | None
) -> None:
    units = data.draw(alike_units(p + extra) | unlike_units(p + extra))
    named = list(_named(units, p, m, comm))
    limit = None if room is None else room * max(named[1][1].peak_bytes)
    within = [line for _, line in named if limit is None or max(line.peak_bytes) <= limit]
    try:
        choice = choose(units, p, m, comm=comm, memory_limit=limit)
    except ValueError:
        assert not within
        return
    assert limit is None or choice.peak_bytes <= limit
    best = min((line.makespan for line in within), default=choice.timeline.makespan)
    assert choice.timeline.makespan <= best * (1 + 1e-8)
    assert choice.costs == stage_costs(units, choice.cuts, comm)
    simulate(lower(choice.make(m)))
    simulate(lower(choice.make(m + 3)))


@given(data=st.data(), p=st.integers(2, 8), chunks=st.integers(2, 3), comm=st.floats(0, 0.2))
@settings(max_examples=14, deadline=None, derandomize=True)
def test_half_of_1f1bs_memory_is_enough(
    data: st.DataObject, p: int, chunks: int, comm: float
) -> None:
    units = data.draw(alike_units(p * chunks))
    cuts = [(start, start + chunks) for start in range(0, p * chunks, chunks)]
    plain = simulate_costs(build("1f1b", p, 2 * p).program, stage_costs(units, cuts, comm))
    limit = max(plain.peak_bytes) / 2
    choice = choose(units, p, 2 * p, comm=comm, memory_limit=limit)
    assert choice.peak_bytes <= limit


@pytest.mark.parametrize(
    ("limit", "chunks", "name"),
    [
        (None, None, "zbv"),
        (800, None, "zbv"),
        (799, None, "greedy-v"),
        (600, None, "v-half"),
        (599, None, "v-min"),
        (499, None, "greedy-v"),
        (None, 1, "zb-h1"),
        (300, 1, "greedy"),
    ],
)
def test_equal_stages_get_the_simplest_of_the_fastest_that_fit(
    limit: int | None, chunks: int | None, name: str
) -> None:
    choice = choose(EQUAL, 4, 8, memory_limit=limit, num_chunks=chunks)
    assert choice.name == name


def test_what_only_waits_needs_no_schedule_of_its_own() -> None:
    assert choose(EQUAL, 1, 4).name == "1f1b"
    assert choose([UnitCosts(1, 2, 0, 100, 0, 0)] * 4, 4, 1).name == "1f1b"


def test_backwards_stay_whole_where_deferring_keeps_too_much() -> None:
    units = [UnitCosts(1, 1, 1, saved=100, deferred=100_000)] * 8
    choice = choose(units, 4, 8, memory_limit=500)
    assert choice.name == "greedy-v-whole"
    assert choice.peak_bytes <= 500
    assert not {"I", "W"} & {action.op for line in choice.make(8).program for action in line}


def test_unequal_stages_get_an_order_of_their_own() -> None:
    units = [UnitCosts(1 + unit % 3, 2, 1, 100, 50, 5) for unit in range(16)]
    choice = choose(units, 4, 16, comm=0.5)
    assert choice.name.startswith("greedy")
    assert choice.timeline.makespan < min(line.makespan for _, line in _named(units, 4, 16, 0.5))
    assert choice.make(16) == choice.make(16)


def test_a_cut_within_the_limit_is_tried_where_the_even_one_keeps_too_much() -> None:
    units = [UnitCosts(1, 1, 1, saved) for saved in (30, 60, 10, 10)]
    assert choose(units, 2, 8, memory_limit=90, num_chunks=1).cuts == [(0, 2), (2, 4)]
    choice = choose(units, 2, 8, memory_limit=80, num_chunks=1)
    assert (choice.name, choice.cuts) == ("zb-h1", [(0, 1), (1, 4)])
    with pytest.raises(ValueError, match="has to keep 90 bytes in the least .* tried"):
        choose(units, 2, 8, memory_limit=79, num_chunks=1)


def test_the_numbers_of_chunks_asked_for_are_kept() -> None:
    units = [UnitCosts(1, 1, 1, 100, 100, 0)] * 20
    for v in (1, 2, 3, 5):
        assert len(choose(units, 4, 8, num_chunks=v).cuts) == 4 * v
    with pytest.raises(ValueError, match="20 units, too few for 24 stages"):
        choose(units, 4, 8, num_chunks=6)
    with pytest.raises(ValueError, match="8 units, too few for 9 stages"):
        choose(EQUAL, 9, 8)
    with pytest.raises(ValueError, match="pipeline.num_chunks = 0: a rank has 1 chunk or more"):
        choose(EQUAL, 4, 8, num_chunks=0)


def test_a_limit_that_nothing_keeps_to_is_refused_with_the_least_that_there_is() -> None:
    with pytest.raises(ValueError) as error:
        choose(EQUAL, 4, 8, memory_limit=150)
    assert str(error.value) == (
        "pipeline.memory_limit = 150: a rank has to keep 200 bytes in the least of all schedules"
        " that were tried: raise the limit to that, make microbatches smaller"
        " (pipeline.num_microbatches), or keep less of each (recompute.mode)"
    )
    assert choose(EQUAL, 4, 8, memory_limit=200).peak_bytes == 200
