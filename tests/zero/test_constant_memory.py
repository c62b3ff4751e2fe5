"""What is kept does not grow, neither with steps nor with microbatches, and stays in its budget."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Engine, Grid, Topology
from parallel3d.assemble.uses import uses_of
from parallel3d.zero.residency import plan, traffic
from tests.engine.cases import SGD, WIDTH, blocks, engine
from tests.live import Live
from tests.world import run_on

STAGES: list[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 2, "zero_reduce": "last"},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "gather_budget": 0},
]


def held(mine: Engine) -> int:
    """Bytes of flat buffers' values that have memory now."""
    return sum(flat.data.untyped_storage().nbytes() for flat in mine.parts.shards.held())


def settled(live: Live) -> int:
    """Live bytes, once gloo's own threads have let go of the last messages."""
    found = []
    for _ in range(10):
        time.sleep(0.02)
        found.append(live.bytes())
    return min(found)


def growth(topology: Topology, stages: list[dict[str, Any]]) -> Any:
    """Live bytes, and gathered ones, after 20 steps and after 200."""
    found = []
    x = torch.ones(4, WIDTH, dtype=torch.float64)
    with Live() as live:
        for stage in stages:
            mine, sizes = engine(topology, blocks(topology, 2), **stage), []
            for steps in (20, 180):
                for _ in range(steps):
                    mine.train_step(x, x)
                gc.collect()
                sizes.append((settled(live), held(mine)))
            found.append(sizes)
            del mine
            gc.collect()
    return found


@pytest.mark.parametrize("layout", ["1x2x1"])
def test_two_hundred_steps_take_no_more_memory_than_twenty(layout: str) -> None:
    for rank in run_on(Grid.parse(layout), growth, stages=STAGES):
        for stage, (early, late) in zip(STAGES, rank, strict=True):
            assert late == early, stage


def buffers(topology: Topology, schedule: str, stage: dict[str, Any]) -> list[int]:
    """The most gradient buffers of whole units at once, lent or under way, of 4 and of 8 parts."""
    found = []
    for count in (4, 8):
        mine = engine(topology, num_microbatches=count, schedule=schedule, **stage)
        gradients, most = mine.parts.shards.gradients, 0
        reduce = gradients.reduce

        def counting(unit: int, microbatch: int, of: Any = gradients, then: Any = reduce) -> None:
            nonlocal most
            lent = sum(len(each) for each in of._lent.values())
            most = max(most, lent + len(of._moving))
            then(unit, microbatch)
            most = max(most, sum(len(each) for each in of._lent.values()) + len(of._moving))

        gradients.reduce = counting  # type: ignore[method-assign]
        x = torch.ones(count, WIDTH, dtype=torch.float64)
        mine.train_step(x, x)
        assert not gradients._lent and not gradients._moving and not gradients._latest
        found.append(most)
    return found


@pytest.mark.parametrize("zero", [2, 3])
def test_microbatches_take_no_buffers_beyond_those_of_two_units(zero: int) -> None:
    each = {"stage": {"zero": zero}, "schedule": "1f1b"}
    assert run_on(Grid(dp=2), buffers, **each) == [[2, 2]] * 2
    last = {"stage": {"zero": zero, "zero_reduce": "last"}, "schedule": "1f1b"}
    assert run_on(Grid(dp=2), buffers, **last) == [[4, 4]] * 2, "those of all units"


class Watched(nn.Module):
    """Calls back in its forward, and when its backward begins."""

    def __init__(self, inner: nn.Module, seen: Any) -> None:
        super().__init__()
        self.inner, self.seen = inner, seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen()
        y = self.inner(x)
        y.register_hook(lambda grad: self.seen())
        return y


def gathered(topology: Topology, budget: int, **options: Any) -> Any:
    """Gathered bytes at each use and after each step, and what the plan says of them."""
    sizes: list[int] = []
    box: list[Engine] = []
    model = nn.Sequential(
        *[Watched(nn.Linear(WIDTH, WIDTH), lambda: sizes.append(held(box[0]))) for _ in range(6)]
    )
    mine = engine(topology, model, zero=3, gather_budget=budget, optimizer=SGD, **options)
    box.append(mine)
    between = []
    x = torch.ones(8, WIDTH, dtype=torch.float64)
    for _ in range(2):
        mine.train_step(x, x)
        between.append(held(mine))
    stages = mine.parts.stages
    units = {at: [unit.number for unit in stages[at].units] for at in stages}
    uses = uses_of(mine.parts.programs.mine(mine.parts.programs.num_microbatches), units)
    bytes_of = {unit: 8 * 128 for numbers in units.values() for unit in numbers}
    return sizes, between, traffic(plan([(use,) for use in uses], bytes_of, budget), bytes_of)


@pytest.mark.parametrize("units", [0, 1, 2, 3, 6])
@pytest.mark.parametrize(("layout", "schedule"), [("1x2x1", "1f1b"), ("2x2x1", "zbv")])
def test_gathered_parameters_stay_in_the_budget_and_are_those_of_the_plan(
    layout: str, schedule: str, units: int
) -> None:
    budget = units * 128 * 8
    options = {"budget": budget, "schedule": schedule, "partition": "uniform"}
    for sizes, between, paper in run_on(Grid.parse(layout), gathered, **options):
        assert max(sizes) == paper.peak <= max(budget, 128 * 8)
        assert min(sizes) >= 128 * 8
        assert max(between) <= max(budget, 128 * 8), "the first of the next step"
