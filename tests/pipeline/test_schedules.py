from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.pipeline.actions import Op, parse, show
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import (
    NAMES,
    build,
    forwards_of,
    forwards_over,
    from_program,
    stage_rank,
)
from parallel3d.pipeline.simulate import simulate

CHUNKED = ("interleaved", "looped-bfs")

ranks = st.integers(1, 16)
microbatches = st.integers(1, 64)
sizes = settings(max_examples=12, deadline=None, derandomize=True)


@pytest.mark.parametrize("name", NAMES)
@given(p=ranks, m=microbatches, v=st.integers(1, 4))
@sizes
def test_every_schedule_is_complete_ascending_and_ends(name: str, p: int, m: int, v: int) -> None:
    schedule = build(name, p, m, v if name in CHUNKED else None)
    timeline = simulate(schedule.program)  # refuses what is missing, twice, descending or circular
    assert len(schedule.program) == p
    assert len(schedule.rank_of_stage) == p * schedule.num_chunks
    for rank, actions in enumerate(schedule.program):
        assert all(schedule.rank_of_stage[action.stage] == rank for action in actions)
        assert Counter(a.stage for a in actions if a.op is Op.FORWARD) == {
            stage: m for stage, home in enumerate(schedule.rank_of_stage) if home == rank
        }
    assert timeline.makespan >= 3 * m
    assert timeline.peak <= m


@given(p=ranks, m=microbatches)
@sizes
def test_gpipe_and_1f1b_take_as_long_as_the_textbook_says(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert simulate(build(name, p, m).program).makespan == 3 * (m + p - 1)


@given(p=ranks, m=microbatches)
@sizes
def test_one_f_one_b_keeps_at_most_p_minus_r_activations(p: int, m: int) -> None:
    timeline = simulate(build("1f1b", p, m).program)
    assert timeline.peaks == [min(p - rank, m) for rank in range(p)]


@pytest.mark.report("pytorch/pytorch#128910")
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min"])
def test_activations_do_not_grow_with_the_number_of_microbatches(name: str) -> None:
    few, many = (simulate(build(name, 4, m).program).peaks for m in (8, 64))
    assert few == many


@given(p=ranks, m=microbatches)
@sizes
def test_zero_bubble_schedules_keep_at_most_p_activations(p: int, m: int) -> None:
    for name in ("zb-h1", "zbv"):
        assert simulate(build(name, p, m).program).peak <= p


@given(p=ranks, rounds=st.integers(1, 4), v=st.integers(1, 4))
@sizes
def test_chunks_divide_the_bubble(p: int, rounds: int, v: int) -> None:
    for name in CHUNKED:
        timeline = simulate(build(name, p, p * rounds, v).program)
        assert timeline.bubble == pytest.approx(3 * (p - 1) / v)


@given(p=ranks, extra=st.integers(0, 32))
@sizes
def test_zero_bubble_schedules_leave_the_papers_bubbles(p: int, extra: int) -> None:
    assert simulate(build("zb-h1", p, p + extra).program).bubble == pytest.approx(p - 1)
    assert simulate(build("zbv", p, 2 * p + extra).program).bubble == pytest.approx((p - 1) / 2)


@given(p=ranks, m=microbatches)
@sizes
def test_a_slower_rhythm_on_the_v_keeps_half_or_a_third(p: int, m: int) -> None:
    half, least = (simulate(build(name, p, m).program) for name in ("v-half", "v-min"))
    assert half.peak <= p / 2 + 1
    assert least.peak <= p / 3 + 2


@given(p=st.integers(2, 16), extra=st.integers(0, 16))
@sizes
def test_a_slower_rhythm_on_the_v_still_waits_less_than_1f1b(p: int, extra: int) -> None:
    m = 2 * p + extra
    plain = simulate(build("1f1b", p, m).program).bubble
    assert simulate(build("v-half", p, m).program).bubble <= plain / 2
    assert simulate(build("v-min", p, m).program).bubble <= plain * 3 / 4


@given(p=st.integers(2, 8), m=microbatches, v=st.integers(2, 4))
@sizes
def test_interleaved_takes_no_longer_than_1f1b_for_any_number_of_microbatches(
    p: int, m: int, v: int
) -> None:
    plain, interleaved = build("1f1b", p, m), build("interleaved", p, m, v)
    assert simulate(interleaved.program).makespan <= simulate(plain.program).makespan + 1e-9


@pytest.mark.report("pytorch/torchtitan#775")
@pytest.mark.report("pytorch/pytorch#144702")
@pytest.mark.report("pytorch/PiPPy#1064")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 7])
def test_fewer_microbatches_than_stages_end(name: str, m: int) -> None:
    for v in (2, 3, 4) if name in CHUNKED else (None,):
        schedule = build(name, 4, m, v)
        assert simulate(lower(schedule)).makespan == simulate(schedule.program).makespan


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (4, 1), (3, 7), (4, 16)])
def test_evaluation_runs_the_forwards_alone_over_the_same_stages(name: str, p: int, m: int) -> None:
    schedule, training = forwards_of(build(name, p, m)), build(name, p, 5)
    assert schedule.rank_of_stage == training.rank_of_stage
    computes = [action for actions in schedule.program for action in actions]
    assert {action.op for action in computes} == {Op.FORWARD}
    assert len(computes) == m * len(schedule.rank_of_stage)
    timeline = simulate(lower(schedule))
    assert timeline.peak <= 1
    assert timeline.makespan <= 2 * (m + p - 1)


@pytest.mark.parametrize("name", ["zbv", "v-half", "v-min"])
@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 16), (8, 24)])
def test_evaluation_on_a_v_takes_no_longer_than_on_a_loop(name: str, p: int, m: int) -> None:
    assert simulate(lower(forwards_of(build(name, p, m)))).makespan == m + p - 1


def test_zb_h1_on_two_ranks_is_the_papers_order() -> None:
    assert show(build("zb-h1", 2, 3).program).splitlines() == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


@pytest.mark.parametrize(
    ("p", "m", "makespan"), [(4, 1, 9), (4, 2, 10.5), (4, 4, 14.5), (8, 11, 37), (8, 15, 48.5)]
)
def test_zbv_wastes_little_on_few_microbatches(p: int, m: int, makespan: float) -> None:
    assert simulate(build("zbv", p, m).program).makespan == makespan


def test_stages_lie_in_a_loop_or_in_a_v() -> None:
    assert [stage_rank(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [stage_rank(stage, 3, "v") for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert build("zbv", 3, 1).rank_of_stage == [0, 1, 2, 2, 1, 0]


def test_a_program_of_the_users_becomes_a_schedule_without_its_messages() -> None:
    schedule = build("zbv", 3, 4)
    again = from_program(parse(show(lower(schedule))))
    assert again == schedule
    evaluation = forwards_over(again, num_microbatches=9)
    assert simulate(lower(evaluation)).makespan == 9 + (3 - 1)


@pytest.mark.parametrize("text", ["0F0 1F0\n2F0", "0F0\n2F0", "0F0 0B0\n\n0SEND_F0"])
def test_a_program_whose_ranks_hold_unlike_numbers_of_stages_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"the ranks of the program hold \["):
        from_program(parse(text))


@given(p=ranks, m=microbatches, v=st.integers(1, 4))
@sizes
def test_forwards_alone_keep_all_ranks_busy_on_any_placement(p: int, m: int, v: int) -> None:
    looped, bent = (
        simulate(lower(forwards_over(build(name, p, 1, chunks), m))).makespan
        for name, chunks in (("interleaved", v), ("zbv", 2))
    )
    assert looped <= m + p - 1 + (v - 1)
    assert bent == m + p - 1


def test_an_unknown_schedule_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"pipeline.schedule = '2f2b' .*gpipe, 1f1b, interleaved"):
        build("2f2b", 2, 2)


def test_no_microbatch_and_no_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline.num_microbatches = 0"):
        build("1f1b", 2, 0)
    with pytest.raises(ValueError, match=r"topology.pp = 0"):
        build("1f1b", 0, 2)


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 2), ("zbv", 1), ("zb-h1", 3), ("interleaved", 0)]
)
def test_chunks_that_a_schedule_cannot_have_are_refused(name: str, chunks: int) -> None:
    with pytest.raises(ValueError, match=f"pipeline.num_chunks = {chunks}, but {name} has"):
        build(name, 4, 8, chunks)
