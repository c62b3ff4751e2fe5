from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.pipeline.costs import Costs, stage_costs
from parallel3d.pipeline.rhythm import Stretch, building_block, repeat, shortest_period
from parallel3d.pipeline.schedules import stage_rank
from tests.pipeline.paper_cases import unlike_units


@given(
    data=st.data(),
    p=st.integers(1, 6),
    comm=st.sampled_from([0.0, 0.5]),
    slower=st.floats(1, 3),
    out=st.floats(1, 4),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_repeated_block_lets_a_rank_do_one_thing_at_a_time(
    data: st.DataObject, p: int, comm: float, slower: float, out: float
) -> None:
    homes = [stage_rank(stage, p, "v") for stage in range(2 * p)]
    units = data.draw(unlike_units(2 * p))
    costs = stage_costs(units, [(s, s + 1) for s in range(2 * p)], comm)
    period = slower * shortest_period(costs, homes)
    block = building_block(costs, homes, period, Stretch(out, 1))
    if block is None:
        return
    for rank in range(p):
        spans = sorted(
            (beat.start + k * period, beat.start + k * period + length)
            for beat in block
            for k in range(12)
            if homes[beat.stage] == rank
            for length in [(costs.forward if beat.is_forward else costs.input_grad)[beat.stage]]
            if length
        )
        assert all(one[1] <= other[0] + 1e-6 for one, other in pairwise(spans))
    for one, other in pairwise(block):
        length = (costs.forward if one.is_forward else costs.input_grad)[one.stage]
        way = comm * (homes[one.stage] != homes[other.stage])
        assert other.start >= one.start + length + way - 1e-9


def test_a_stretch_is_between_ranks_and_in_one_direction() -> None:
    ones = (1,) * 4
    costs = Costs(ones, ones, ones, saved=ones, deferred=ones, output=ones)
    block = building_block(costs, [0, 1, 1, 0], 6, Stretch(2, 1))
    assert block is not None
    assert [(beat.start, beat.stage) for beat in block if beat.is_forward] == [
        (0, 0), (2, 1), (3, 2), (4, 3),
    ]  # fmt: skip
    order = repeat(block, [0, 1, 1, 0], 6, 2)[1]
    assert [(due.stage, due.microbatch) for due in order if due.is_forward] == [
        (1, 0), (2, 0), (1, 1), (2, 1),
    ]  # fmt: skip
    assert [due.is_forward for due in order] == [True] * 2 + [False] + [True] * 2 + [False] * 3


def test_a_period_without_room_has_no_block() -> None:
    costs = Costs((3, 3), (3, 3), (0, 0), saved=(1, 1), deferred=(0, 0), output=(0, 0))
    assert building_block(costs, [0, 0], 11, Stretch(1, 1)) is None
    assert building_block(costs, [0, 0], 12, Stretch(1, 1)) is not None
