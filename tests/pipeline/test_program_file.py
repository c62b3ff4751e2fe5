from pathlib import Path

import pytest

from parallel3d.pipeline.actions import Op, parse, show
from parallel3d.pipeline.passes import add_communication, add_reduce, lower
from parallel3d.pipeline.program_file import given_program, read_program
from parallel3d.pipeline.schedules import NAMES, build

COMPUTES = """
# two ranks, three microbatches
0F0 0F1 0B0 0F2 0B1 0B2   # the first keeps two

1F0 1B0 1F1 1B1 1F2 1B2
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "mine.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_of_computes_is_that_schedule_and_its_messages_are_ours_to_add(
    tmp_path: Path,
) -> None:
    given = read_program(_file(tmp_path, COMPUTES), 2)
    assert given.schedule == build("1f1b", 2, 3)
    assert given.num_microbatches == 3
    assert given.lowered is None


@pytest.mark.parametrize(("encoding", "newline"), [("utf-8-sig", "\r\n"), ("utf-8", "\r")])
def test_a_file_of_another_editor_is_read_alike(
    encoding: str, newline: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("0F0 0B0\n1F0 1B0\n", encoding=encoding, newline=newline)
    assert show(read_program(path, 2).schedule.program) == "0F0 0B0\n1F0 1B0"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_writes_runs_again_as_it_is(name: str, tmp_path: Path) -> None:
    schedule = build(name, 3, 7)
    program = lower(schedule, early=2)
    given = read_program(_file(tmp_path, show(program) + "\n"))
    assert given == (schedule, 7, program)


def test_messages_that_are_given_stay_and_reduce_is_added_where_it_is_absent() -> None:
    program = add_communication(build("zbv", 2, 4), early=3)
    given = given_program(program, 2)
    assert given.lowered == add_reduce(program)
    assert [[a for a in line if a.op is not Op.REDUCE] for line in given.lowered or []] == program


def test_a_reduce_may_stand_anywhere_between_the_last_two_gradients_of_its_stage() -> None:
    early = parse("0F0 0F1 0B0 0REDUCE1 1F0 1B0 1F1 1REDUCE1 1B1 0B1")
    assert add_reduce(early) == early
    apart = parse("0F0 0F1 0I0 0I1 0W0 0REDUCE1 0W1")
    assert add_reduce(apart) == apart


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0F0 0F1 0REDUCE1 0B0 0B1", "0REDUCE1 0B0 0B1"),
        ("0F0 0F1 0B0 0B1 0REDUCE1", "0B0 0B1 0REDUCE1"),
        ("0F0 0F1 0REDUCE0 0B0 0REDUCE1 0B1", "0REDUCE0 0B0 0REDUCE1 0B1"),
        ("0F0 0F1 0B0 0REDUCE0 0B1", "0B0 0REDUCE0 0B1"),
    ],
)
def test_a_reduce_at_another_place_is_refused_with_the_right_one(text: str, found: str) -> None:
    with pytest.raises(ValueError, match=f"by {found}, but that must be 0B0 0REDUCE1 0B1: put"):
        given_program(parse(text))


def test_a_stage_without_reduce_beside_one_that_has_it_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 1 .* by 1B0, but that must be 1REDUCE0 1B0"):
        given_program(parse("0F0 0REDUCE0 0B0\n1F0 1B0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B0\n\n# two\n1F0 1Q0", r"line 4: '1Q0' is not an action: .*0F0"),
        ("0F0 0B0\n1F0 1B0\n2F0 2B0", "lines of actions: 3, but topology.pp = 2: write one"),
        ("0F0 0B0", "lines of actions: 1, but topology.pp = 2"),
        ("# nothing yet", "lines of actions: 0, but topology.pp = 2"),
        ("0F0 0F1 0B0\n1F0 1F1 1B0 1B1", "the program has no 0B1 or 0I1"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0", "the program has no 1F1"),
        ("0F0 0B0 1F0\n1B0", "1F0 is on rank 0, but stage 1 lives on rank 1"),
        ("0F0 1F0 1B0 0B0\n2F0 2B0", r"hold \[2, 1\] of the stages .* give each rank as many"),
        ("0F1 0F0 0B0 0B1\n1F0 1F1 1B0 1B1", "rank 0 runs 0F1 before 0F0: .* must ascend"),
        ("0F0 0SEND_F0 0B0\n1F0 1B0", "needs 1RECV_F0, which is on no rank: write all messages"),
        ("0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0", "0B0 on rank 0 needs 0RECV_B0, which is on no"),
        ("0F99999999999 0B0\n1F0 1B0", "the program has no 0F0"),
        ("0F0 0F99999999999\n1F0 1B0", "the program has no 0F1"),
        ("0F0 0F1\n1F0 1F1", "forwards alone trains nothing"),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", "cannot finish: rank 0 at 0B0 waits for 1B0, which"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"mine\.txt: .*{message}"):
        read_program(_file(tmp_path, text), 2)


@pytest.mark.report("NVIDIA/nccl#479")
def test_a_crossed_send_order_in_a_file_is_refused_with_its_circle(tmp_path: Path) -> None:
    crossed = """
        0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0RECV_B1 0B0 0B1
        1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1
    """
    circle = (
        "program cannot finish: rank 0 at 0SEND_F1 waits for 1RECV_F1, which stands behind 1RECV_F0"
        " on rank 1, which waits for 0SEND_F0, which stands behind 0SEND_F1 on rank 0\n"
    )
    with pytest.raises(ValueError, match=circle):
        read_program(_file(tmp_path, crossed), 2)


def test_a_file_that_is_not_there_is_refused_as_the_schedule_it_was_given_for(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="pipeline.schedule = .*nowhere.txt.* no such file"):
        read_program(tmp_path / "nowhere.txt", 2)
