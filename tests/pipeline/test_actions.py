import pytest

from parallel3d.pipeline.actions import Action, Op, parse, parse_action, show
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import build


@pytest.mark.parametrize("op", list(Op))
def test_every_action_prints_as_stage_op_microbatch_and_reads_back(op: Op) -> None:
    action = Action(12, op, 34)
    assert str(action) == f"12{op.value}34"
    assert parse_action(str(action)) == action


def test_a_program_prints_one_line_a_rank() -> None:
    program = [
        [Action(0, Op.FORWARD, 0), Action(0, Op.SEND_FORWARD, 0), Action(0, Op.RECV_BACKWARD, 0)],
        [Action(1, Op.RECV_FORWARD, 0)],
    ]
    assert show(program) == "0F0 0SEND_F0 0RECV_B0\n1RECV_F0"


def test_a_lowered_program_reads_back_from_what_it_prints() -> None:
    program = lower(build("zbv", 3, 5))
    assert parse(show(program) + "\n") == program


@pytest.mark.parametrize("text", ["", "F0", "0F", "0X0", "0F0 ", "0f0", "-1F0", "0SEND0"])
def test_what_is_no_action_is_refused_with_the_form_and_the_ops(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not an action.*0F0.*RECV_F"):
        parse_action(text)
