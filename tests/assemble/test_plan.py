"""Schedules that are chosen or given, and cuts by what units cost; the numbers stay the same."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.pipeline.actions import parse
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import build
from parallel3d.pipeline.simulate import simulate_costs
from parallel3d.topology import Grid, Topology
from tests.engine.trials import (
    Trial,
    assert_equal_to,
    by_engine,
    by_plain_torch,
    engine_of,
    follow,
)
from tests.world import RankFailed, run_on

WIDTH = 8
SAMPLE = (torch.ones(2, WIDTH, dtype=torch.float64), torch.zeros(2, WIDTH, dtype=torch.float64))
OWN = "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"
CROSSED = """
0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1
1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
"""


class Slow(nn.Module):
    """Costs time and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x


class Wide(nn.Module):
    """Costs many FLOPs and few parameters: the same small product over and over."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(self.layer(x))
        return x


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def plain() -> nn.Sequential:
    return nn.Sequential(*[layer() for _ in range(4)])


def slow_first() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(layer(), Slow()), layer(), layer(), layer())


def wide_first() -> nn.Sequential:
    return nn.Sequential(Wide(), layer(), layer(), layer())


def batches(count: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shape = (2, 7, WIDTH)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(count))
    return [(x, target) for x, target in drawn]


def trial(model: Any = plain, **options: Any) -> Trial:
    return Trial(model, batches(), options={"num_microbatches": 3, **options})


def check(grid: Grid, *trials: Trial) -> None:
    for found, each in zip(by_engine(grid, trials), trials, strict=True):
        assert_equal_to(by_plain_torch(each), found)


def cuts(topology: Topology, of: Trial) -> list[tuple[int, int]]:
    return engine_of(topology, of).parts.cuts


@pytest.mark.parametrize(("model", "method"), [(slow_first, "measure"), (wide_first, "flops")])
def test_a_heavy_unit_gets_a_stage_of_its_own(model: Any, method: str) -> None:
    heavy = trial(model, partition=method, sample=SAMPLE)
    assert run_on(Grid(pp=2), cuts, of=heavy) == [[(0, 1), (1, 4)]] * 2
    even = replace(heavy, options={"num_microbatches": 3, "partition": "parameters"})
    assert run_on(Grid(pp=2), cuts, of=even) == [[(0, 2), (2, 4)]] * 2
    check(Grid(pp=2), heavy)


@pytest.mark.parametrize("grid", [Grid(pp=2), Grid(pp=2, dp=2)])
def test_the_schedule_that_is_chosen_gives_the_numbers_of_plain_torch(grid: Grid) -> None:
    by = ("measure", "flops", "parameters", "uniform")
    check(grid, *[trial(schedule="auto", partition=each, sample=SAMPLE) for each in by])


@pytest.mark.parametrize("asked", [{"partition": "measure"}, {"schedule": "auto"}])
def test_what_looks_at_the_units_needs_a_sample(asked: dict[str, str]) -> None:
    with pytest.raises(RankFailed, match="sample=") as caught:
        run_on(Grid(pp=2), cuts, of=trial(**asked))
    assert str(caught.value).count("\nValueError") == 2, "told on every rank"


def test_activations_over_the_limit_are_refused_with_both_numbers() -> None:
    asked = trial(memory_limit=10, sample=SAMPLE)
    with pytest.raises(RankFailed, match=r"memory_limit = 10, but .* take \d+ bytes"):
        run_on(Grid(pp=2), cuts, of=asked)
    check(Grid(pp=2), trial(memory_limit=1e6, sample=SAMPLE))


def peak_of(topology: Topology, of: Trial) -> float:
    parts = engine_of(topology, of).parts
    assert parts.costs is not None
    program = parts.programs.whole(parts.programs.num_microbatches)
    return max(simulate_costs(program, parts.costs).peak_bytes)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv", "auto"])
def test_what_a_schedule_keeps_on_paper_is_limit_enough(schedule: str) -> None:
    asked = {"schedule": schedule, "sample": SAMPLE, "num_microbatches": 6}
    (peak, _) = run_on(Grid(pp=2), peak_of, of=trial(memory_limit=1e9, **asked))
    # Times are measured anew, and a message that comes earlier is kept longer.
    limit = 1.2 * peak
    (again, _) = run_on(Grid(pp=2), peak_of, of=trial(memory_limit=limit, **asked))
    assert again <= limit


def test_a_program_of_the_users_runs_from_a_file_or_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(OWN)
    whole = lower(build("zb-h1", 2, 3))
    check(
        Grid(pp=2),
        trial(schedule=str(path)),
        trial(schedule=parse(OWN)),
        trial(schedule=whole),
    )


def test_messages_that_the_user_gave_run_as_they_are_given() -> None:
    whole = lower(build("1f1b", 2, 3), early=2)
    assert run_on(Grid(pp=2), program_of, of=trial(schedule=whole))[0] == whole


def program_of(topology: Topology, of: Trial) -> Any:
    return engine_of(topology, of).parts.programs.whole(3)


def test_a_crossed_order_is_refused_with_the_circle_of_who_waits(tmp_path: Path) -> None:
    path = tmp_path / "crossed.txt"
    path.write_text(CROSSED)
    asked = trial(schedule=str(path), num_microbatches=2)
    with pytest.raises(RankFailed, match=r"(?s)crossed\.txt.*waits for.*waits for") as caught:
        run_on(Grid(pp=2), cuts, of=asked)
    assert str(caught.value).count("\nValueError") == 2, "told on every rank"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_microbatches": 4}, r"num_microbatches = 4, but the program .* has 3"),
        ({"num_chunks": 2}, r"num_chunks = 2, but the program .* has 1"),
    ],
)
def test_a_program_for_other_numbers_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        run_on(Grid(pp=2), cuts, of=trial(schedule=parse(OWN), **options))


def evaluate_more(topology: Topology, of: Trial) -> list[float]:
    engine = engine_of(topology, of)
    follow(engine, of.steps)
    losses = [engine.eval_step(*batch).loss for batch in batches()]
    x, target = batches()[0]
    parts = list(zip(x.split(1), target.split(1), strict=True))
    losses.append(engine.eval_step(parts).loss)
    with pytest.raises(ValueError, match="7 microbatches, but the program"):
        engine.train_step(parts)
    return losses


def test_a_program_of_the_users_evaluates_any_number_of_microbatches() -> None:
    own, named = (
        run_on(Grid(pp=2), evaluate_more, of=trial(schedule=schedule))
        for schedule in (parse(OWN), lower(build("zb-h1", 2, 3)))
    )
    assert own == named
    assert own[0] == own[1]
    assert own[0][0] == pytest.approx(own[0][2], rel=1e-12)
