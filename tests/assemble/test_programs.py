from __future__ import annotations

import pytest

from parallel3d.assemble.programs import Programs, named
from parallel3d.pipeline.schedules import NAMES
from parallel3d.topology import Axis


def pp(size: int, rank: int = 0) -> Axis:
    return Axis("pp", size, rank, tuple(range(size)))


def programs_of(name: str, axis: Axis, num_microbatches: int) -> Programs:
    return Programs(named(name, axis.size, num_microbatches, None), axis)


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="1f2b"):
        programs_of("1f2b", pp(2), 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_has_its_line_of_the_program_also_for_few_microbatches(
    name: str, size: int
) -> None:
    for rank in range(size):
        programs = programs_of(name, pp(size, rank), 3)
        for count in (1, 2, 3, 7):
            for training in (True, False):
                whole = programs.whole(count, training)
                assert programs.mine(count, training) == whole[rank]
                assert whole is programs.whole(count, training), "made once"
                ops = [action.op for action in whole[rank]]
                done = count * (programs.num_stages // size)
                assert ops.count("F") == done
                assert ops.count("B") + ops.count("W") == (done if training else 0)
                assert ops.count("I") == ops.count("W")


@pytest.mark.parametrize(("name", "splits"), [("1f1b", False), ("zb-h1", True), ("zbv", True)])
def test_zero_bubble_schedules_split_the_backward(name: str, splits: bool) -> None:
    assert programs_of(name, pp(2), 4).splits_backward is splits


def test_the_text_has_a_line_for_each_rank() -> None:
    programs = programs_of("1f1b", pp(3), 4)
    lines = programs.text().splitlines()
    assert len(lines) == programs.num_stages == 3
    assert all("REDUCE" in line for line in lines)
