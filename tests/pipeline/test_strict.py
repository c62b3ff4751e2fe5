"""Programs on channels as strict as those that `simulate` proves them for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d.pipeline.actions import Action, Op, parse
from parallel3d.pipeline.dependencies import Dependencies
from parallel3d.pipeline.passes import add_communication, lower
from parallel3d.pipeline.runtime import Step
from parallel3d.pipeline.schedules import NAMES, build, forwards_of
from parallel3d.pipeline.simulate import simulate
from parallel3d.topology import Grid, Topology
from tests.engine.trials import (
    Trace,
    Trial,
    assert_equal_to,
    by_plain_torch,
    engine_of,
    follow,
    on_rank,
)
from tests.pipeline.strict import make_strict
from tests.world import run_on

COUNTS = (1, 2, 3, 4, 7)


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(8)])


def trial(schedule: str, num_microbatches: int) -> Trial:
    generator = torch.Generator().manual_seed(1)
    x, target, more, other = torch.randn(4, 7, 4, generator=generator, dtype=torch.float64)
    options = {"schedule": schedule, "num_microbatches": num_microbatches}
    # The second step knows its shapes and posts receives early.
    return Trial(layers, [(x, target), (more, other)], options=options)


def growing(schedule: str) -> Trial:
    """Every microbatch of a step has another size, none of which is known in the first."""
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(2, 10, 4, generator=generator, dtype=torch.float64).split([1, 2, 3, 4], 1)
    return Trial(layers, [[tuple(pair) for pair in samples]] * 2, options={"schedule": schedule})


def all_trials() -> list[Trial]:
    trials = [trial(schedule, m) for schedule in ("gpipe", "1f1b") for m in COUNTS]
    chunked = ("interleaved", "looped-bfs", "zb-h1", "zbv")
    return [*trials, growing("gpipe"), growing("1f1b"), *(trial(name, 3) for name in chunked)]


def strictly(topology: Topology, trials: list[Trial], folder: str) -> list[Trace]:
    traces = []
    for number, each in enumerate(trials):
        engine = engine_of(topology, each)
        make_strict(engine.parts.interpreter.borders, topology, f"{folder}/{number}")
        engine.eval_step(torch.zeros(3, 4), torch.zeros(3, 4))
        traces.append(follow(engine, each.steps))
    return traces


@pytest.mark.report("pytorch/torchtitan#775")
@pytest.mark.report("pytorch/pytorch#144702")
@pytest.mark.report("pytorch/PiPPy#1064")
@pytest.mark.report("NVIDIA/nccl#479")
@pytest.mark.parametrize("pp", [2, 4])
def test_any_number_of_microbatches_ends_on_strict_channels_and_equals_one_process(
    pp: int, tmp_path: Path
) -> None:
    trials = all_trials()
    strict = run_on(Grid(pp=pp), strictly, trials=trials, folder=str(tmp_path))[0]
    with Topology.init() as topology:
        single = on_rank(topology, trials)
    for each, trace, alone in zip(trials, strict, single, strict=True):
        assert_equal_to(by_plain_torch(each), trace)
        assert trace.results == alone.results
        for one, other in zip(trace.weights, alone.weights, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


CROSSED = """
0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
"""


def cross(topology: Topology, strict: bool, path: str) -> str | None:
    each = trial("1f1b", 2)
    engine = engine_of(topology, each)
    engine.train_step(*each.steps[0])
    engine.train_step(*each.steps[0])
    borders = engine.parts.interpreter.borders
    if strict:
        make_strict(borders, topology, path, patience=1.0)
    (x, target), criterion = each.steps[0], engine.parts.criterion
    criterion.begin(list(target.tensor_split(2)), lambda: torch.ones(()))
    shapes = [shape for training, shape in borders[1]._known if training]
    step = Step(list(x.tensor_split(2)), [0, 1], shapes, True, criterion)
    actions: Any = parse(CROSSED)[topology.pp.rank]
    try:
        engine.parts.interpreter.run(actions, step)
    except RuntimeError as error:
        return error.__notes__[-1]
    return None


def test_sends_that_cross_pass_on_real_channels_hang_on_strict_ones_and_are_refused_on_paper(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "store")
    assert run_on(Grid(pp=2), cross, strict=False, path=path) == [None, None]
    start = time.monotonic()
    first, second = run_on(Grid(pp=2), cross, strict=True, path=path)
    assert first.endswith(">>> 0SEND_F1") and second.endswith(">>> 1SEND_B0")
    assert time.monotonic() - start > 1.0
    with pytest.raises(ValueError, match="cannot finish"):
        simulate(parse(CROSSED))


@pytest.mark.parametrize("name", NAMES)
def test_programs_without_early_receives_end_though_each_receive_waits_for_its_description(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On paper, for every schedule: so is a step run whose shapes are not known yet."""
    programs = [
        lower(build(name, pp, m), early=0) for pp in (1, 2, 3, 4) for m in (1, 2, 3, 4, 5, 7)
    ]
    programs += [
        add_communication(forwards_of(build(name, pp, m)), early=0)
        for pp in (2, 4)
        for m in (1, 3, 4)
    ]
    needs = Dependencies.needs

    def and_its_sender(self: Dependencies, action: Action) -> list[Action]:
        is_forward = action.op is Op.RECV_FORWARD
        sender = [Action(action.stage - 1, Op.FORWARD, action.microbatch)] if is_forward else []
        return [*needs(self, action), *sender]

    monkeypatch.setattr(Dependencies, "needs", and_its_sender)
    for program in programs:
        simulate(program)
