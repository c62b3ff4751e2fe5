"""What the pipeline benchmark makes of the computes that it timed."""

from __future__ import annotations

import pytest

from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import NAMES, build
from parallel3d.pipeline.simulate import simulate
from tools.bench.pipeline import Round, measured, on_paper, quietest
from tools.bench.pipeline_sides import TORCHS, Result, Work

WORK = Work(pp=2, num_microbatches=5, width=16, num_layers=4, seq_len=8)


@pytest.mark.parametrize("schedule", NAMES)
def test_a_step_that_goes_as_simulated_is_measured_and_simulated_alike(schedule: str) -> None:
    program = lower(build(schedule, WORK.pp, WORK.num_microbatches))
    true = simulate(program, f=1.0, i=1.5, w=0.5, comm=0.25)
    ranks = [Result(0.0, 0.0, None, spans) for spans in true.spans]
    window, bubble = measured(ranks)
    assert window == pytest.approx(true.makespan)
    assert bubble == pytest.approx(true.bubble / true.makespan)
    assert on_paper(WORK, schedule, [ranks], 0.25).makespan == pytest.approx(true.makespan)


def test_every_torch_schedule_has_a_name_of_ours() -> None:
    assert set(TORCHS) <= set(NAMES)


def test_stages_have_as_many_blocks_each() -> None:
    assert WORK.starts(2) == [0, 3]
    assert WORK.starts(4) == [0, 2, 3, 4]


def test_rounds_that_others_disturbed_are_left_out_while_three_are_quiet() -> None:
    quiet, busy = (Round([], None, others) for others in (0.0, 0.5))
    assert quietest([busy, quiet, quiet, busy, quiet]) == [quiet] * 3
    assert quietest([busy, quiet, busy, busy]) == [quiet, busy, busy]
