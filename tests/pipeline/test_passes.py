from itertools import combinations

import pytest

from parallel3d.pipeline.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Op,
    Program,
    Schedule,
    parse,
    show,
    show_actions,
)
from parallel3d.pipeline.passes import add_communication, add_reduce, lower, split_backward
from parallel3d.pipeline.schedules import NAMES, build, forwards_of
from parallel3d.pipeline.simulate import simulate


def test_1f1b_on_two_ranks_lowers_to_this() -> None:
    assert show(lower(build("1f1b", 2, 2), early=0)).splitlines() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0REDUCE1 0B1",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1REDUCE1 1B1 1SEND_B1",
    ]


@pytest.mark.parametrize("early", [0, 1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_receive_is_posted_the_given_number_of_computes_early_or_sooner(
    name: str, early: int
) -> None:
    for actions in add_communication(build(name, 4, 12), early):
        computes = [action for action in actions if action.op in COMPUTE]
        for at, action in enumerate(actions):
            if action.op in RECEIVES:
                ahead = sum(a.op in COMPUTE for a in actions[:at])
                used = next(n for n, a in enumerate(computes) if _is_used_by(action, a))
                before = next((a for a in reversed(actions[:at]) if a.op not in RECEIVES), None)
                follows_send = before is not None and before.op is Op.SEND_FORWARD
                is_gradient = action.op is Op.RECV_BACKWARD
                assert used - ahead >= min(early, used) or (is_gradient and follows_send)


def _is_used_by(receive: Action, compute: Action) -> bool:
    ops = {Op.FORWARD} if receive.op is Op.RECV_FORWARD else {Op.BACKWARD, Op.INPUT_GRAD}
    return compute.op in ops and compute[::2] == receive[::2]


@pytest.mark.parametrize("name", NAMES)
def test_the_receive_of_a_gradient_stands_behind_the_send_of_its_activation(name: str) -> None:
    for actions in add_communication(build(name, 3, 7), early=5):
        for at, action in enumerate(actions):
            if action.op is Op.RECV_BACKWARD:
                assert action._replace(op=Op.SEND_FORWARD) in actions[:at]
    with pytest.raises(ValueError, match="rank 0 at 0RECV_B0 waits for 0SEND_F0"):
        simulate(parse("0RECV_B0 0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0"))


def test_receives_are_not_posted_sooner_than_needed_in_a_program_of_forwards() -> None:
    program = add_communication(forwards_of(build("1f1b", 2, 3)), early=0)
    assert show_actions(program[1]) == "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2"


def test_stages_that_meet_on_a_rank_send_nothing() -> None:
    program = lower(build("zbv", 4, 8))
    ends = {(a.stage, a.op) for actions in program for a in actions if a.op in SENDS | RECEIVES}
    assert (3, Op.SEND_FORWARD) not in ends
    assert (4, Op.RECV_FORWARD) not in ends
    assert (2, Op.SEND_FORWARD) in ends
    alone = lower(build("interleaved", 1, 4, 3))
    assert not {a.op for a in alone[0]} & (SENDS | RECEIVES)


@pytest.mark.report("NVIDIA/nccl#479")
@pytest.mark.parametrize("p", [2, 4])
def test_two_sends_or_receives_of_a_channel_swapped_are_refused(p: int) -> None:
    program = lower(build("1f1b", p, 4))
    for op in (*SENDS, *RECEIVES):
        mutants = list(_swapped(program, op))
        assert mutants
        for mutant in mutants:
            with pytest.raises(ValueError, match="cannot finish: .* waits for .* stands behind"):
                simulate(mutant)


def _swapped(program: Program, op: Op) -> list[Program]:
    mutants = []
    for rank, actions in enumerate(program):
        for a, b in combinations([n for n, action in enumerate(actions) if action.op is op], 2):
            mutant = [list(line) for line in program]
            mutant[rank][a], mutant[rank][b] = actions[b], actions[a]
            mutants.append(mutant)
    return mutants


@pytest.mark.parametrize("name", NAMES)
def test_a_program_without_one_of_its_actions_is_refused(name: str) -> None:
    program = add_communication(build(name, 2, 3))
    for rank, actions in enumerate(program):
        for at in range(len(actions)):
            mutant = [list(line) for line in program]
            del mutant[rank][at]
            with pytest.raises(ValueError, match=r"needs|has no|the stages are"):
                simulate(mutant)


def test_a_receive_posted_after_its_compute_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 1 at 1F0 waits for 1RECV_F0"):
        simulate(parse("0F0 0SEND_F0\n1F0 1RECV_F0"))


def test_lowering_names_the_circle_of_a_schedule_that_cannot_finish() -> None:
    schedule = Schedule(parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), [0, 1], 1)
    with pytest.raises(
        ValueError,
        match=r"0B0 waits for 1B0, .* 1F1 on rank 1, which waits for 0F1, .* 0B0 on rank 0",
    ):
        lower(schedule)


def test_a_negative_early_is_refused() -> None:
    with pytest.raises(ValueError, match="early = -1"):
        lower(build("1f1b", 2, 2), early=-1)


def test_reduce_stands_directly_before_what_completes_a_stages_gradients() -> None:
    program = parse("0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1B0 1F1 1B1")
    assert show(add_reduce(program)).splitlines() == [
        "0F0 0F1 0I0 0I1 0W0 0REDUCE1 0W1",
        "1F0 1B0 1F1 1REDUCE1 1B1",
    ]
    assert show(add_reduce(program, each=True)).splitlines() == [
        "0F0 0F1 0I0 0I1 0REDUCE0 0W0 0REDUCE1 0W1",
        "1F0 1REDUCE0 1B0 1F1 1REDUCE1 1B1",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_reduces_once_or_once_a_microbatch(name: str) -> None:
    schedule = build(name, 3, 5)
    for each, count in ((False, 1), (True, 5)):
        program = lower(schedule, each=each)
        reduces = [a.stage for actions in program for a in actions if a.op is Op.REDUCE]
        assert sorted(reduces) == sorted(list(range(len(schedule.rank_of_stage))) * count)
        assert simulate(program).makespan == simulate(schedule.program).makespan


def test_split_backward_keeps_each_weight_gradient_for_delay_input_gradients() -> None:
    assert show_actions(split_backward(parse("0F0 0B0 0B1 0B2")[0], delay=0)) == (
        "0F0 0I0 0W0 0I1 0W1 0I2 0W2"
    )
    assert show_actions(split_backward(parse("0F0 0B0 0B1 0B2")[0], delay=2)) == (
        "0F0 0I0 0I1 0I2 0W0 0W1 0W2"
    )
