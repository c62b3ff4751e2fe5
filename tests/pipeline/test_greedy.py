import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.pipeline.actions import COMPUTE, Op, show
from parallel3d.pipeline.costs import Costs, stage_costs
from parallel3d.pipeline.filling import Filling
from parallel3d.pipeline.greedy import greedy, least_bytes
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.rhythm import Due
from parallel3d.pipeline.schedules import build, stage_rank
from parallel3d.pipeline.simulate import simulate, simulate_costs
from tests.pipeline.paper_cases import unlike_units

random = settings(max_examples=25, deadline=None, derandomize=True)


def _placed(p: int, style: str) -> list[int]:
    return [stage_rank(stage, p, style) for stage in range(p if style == "loop" else 2 * p)]


def _equal(p: int, style: str, comm: float = 0.0) -> tuple[Costs, list[int]]:
    """Stages of which a rank's cost and keep 2, 2 and 2 together."""
    homes = _placed(p, style)
    one, none = (2 * p // len(homes),) * len(homes), (0,) * len(homes)
    return Costs(one, one, one, saved=one, deferred=one, output=none, comm=comm), homes


@given(
    data=st.data(),
    p=st.integers(1, 8),
    m=st.integers(1, 24),
    style=st.sampled_from(["loop", "v"]),
    split=st.booleans(),
    comm=st.sampled_from([0.0, 0.1, 3.0]),
    room=st.floats(0, 8),
)
@random
def test_an_order_ends_with_blocking_sends_and_keeps_to_the_limit(
    data: st.DataObject, p: int, m: int, style: str, split: bool, comm: float, room: float
) -> None:
    homes = _placed(p, style)
    units = data.draw(unlike_units(len(homes)))
    costs = stage_costs(units, [(s, s + 1) for s in range(len(homes))], comm)
    limit = least_bytes(costs, homes, split) * (1 + room)
    schedule = greedy(costs, homes, m, limit, split)
    assert schedule.rank_of_stage == homes
    timeline = simulate_costs(schedule.program, costs)  # refuses what is missing or descending
    assert max(timeline.peak_bytes) <= limit
    lowered = lower(schedule)
    simulate_costs(lowered, costs)
    computes = [[action for action in actions if action.op in COMPUTE] for actions in lowered]
    assert computes == schedule.program
    assert {action.op for action in computes[0]} == (
        {Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD} if split else {Op.FORWARD, Op.BACKWARD}
    )


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("m", [1, 3, 8, 24])
def test_with_the_memory_of_zb_h1_and_zbv_equal_stages_take_no_longer(p: int, m: int) -> None:
    for name, style in (("zb-h1", "loop"), ("zbv", "v")):
        costs, homes = _equal(p, style)
        named = simulate_costs(build(name, p, m).program, costs)
        made = simulate_costs(greedy(costs, homes, m, memory_limit=2 * p).program, costs)
        assert made.makespan <= named.makespan
        assert max(made.peak_bytes) <= 2 * p


@pytest.mark.parametrize("p", [4, 6, 7, 8])  # for 3 and 5 the half is below p/3 + 1
def test_at_half_of_1f1bs_memory_a_v_waits_less_than_1f1b(p: int) -> None:
    costs, homes = _equal(p, "v")
    made = simulate_costs(greedy(costs, homes, 24, memory_limit=p).program, costs)
    assert made.bubble < simulate(build("1f1b", p, 24).program, f=2, i=2, w=2).bubble
    assert max(made.peak_bytes) <= p


def test_without_a_limit_an_order_keeps_no_more_than_its_speed_needs() -> None:
    for style in ("loop", "v"):
        costs, homes = _equal(4, style)
        timeline = simulate_costs(greedy(costs, homes, 24).program, costs)
        assert max(timeline.peak_bytes) <= 2 * 4


def test_a_weight_gradient_waits_for_a_gap_or_for_memory() -> None:
    costs = Costs((1, 1), (1, 1), (1, 1), saved=(4, 4), deferred=(4, 4), output=(0, 0))
    roomy, tight = (greedy(costs, [0, 1], 3, limit) for limit in (None, 4))
    assert show(roomy.program).splitlines() == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]
    assert show(tight.program).splitlines() == [
        "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2",
        "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2",
    ]


def test_a_weight_gradient_makes_the_next_input_wait_as_far_as_patience_goes() -> None:
    one, none = (1, 1), (0, 0)
    costs = Costs(one, one, (4, 0), saved=one, deferred=one, output=none, comm=0.5)
    orders = [[Due(is_forward, 0, k) for is_forward in (True, False) for k in (0, 1)]]
    orders.append([Due(is_forward, 1, k) for k in (0, 1) for is_forward in (True, False)])
    # 0I0 ends at 5, the input of 0I1 is there at 6: 0W0 in between would make it wait for 3 of 4
    eager, careful = (
        show(Filling(costs, [0, 1], orders, 100, patience).program[:1]) for patience in (0.8, 0.7)
    )
    assert eager == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert careful == "0F0 0F1 0I0 0I1 0W0 0W1"


def test_a_slow_message_asks_for_more_microbatches_on_the_way() -> None:
    costs, homes = _equal(4, "loop", comm=4.0)
    made = simulate_costs(greedy(costs, homes, 24).program, costs)
    named = simulate_costs(build("zb-h1", 4, 24).program, costs)
    assert made.makespan < 0.8 * named.makespan
    assert made.peak > named.peak


def test_a_limit_below_one_microbatch_is_refused_with_what_it_keeps() -> None:
    costs = Costs((1, 1), (1, 1), (1, 1), saved=(4, 7), deferred=(2, 9), output=(5, 5))
    assert least_bytes(costs, [0, 1]) == 9
    assert least_bytes(costs, [0, 1], split=False) == 9
    assert least_bytes(costs, [0, 0]) == 4 + 5 + 7
    greedy(costs, [0, 1], 3, 9)
    with pytest.raises(ValueError, match="a limit of 8 bytes, but .* keeps 9: allow that much"):
        greedy(costs, [0, 1], 3, 8)
