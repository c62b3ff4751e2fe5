"""The costs of a model's units: the same on all ranks, and nothing is changed by asking."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.assemble.measure import count_flops, measure
from parallel3d.assemble.model import units_of
from parallel3d.assemble.options import Options
from parallel3d.pipeline.costs import UnitCosts
from parallel3d.topology import Grid, Topology
from tests.engine.cases import WIDTH, Block
from tests.world import run_on


class Tagged(nn.Module):
    """Alike but for an attribute."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


def options(**more: Any) -> Options:
    sample = (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    defaults = {"loss_fn": nn.MSELoss(reduction="sum"), "optimizer": torch.optim.SGD}
    return Options(**{**defaults, "sample": sample, **more})


def costs_of_blocks(topology: Topology, **more: Any) -> tuple[list[UnitCosts], float]:
    with torch.device("meta"):
        model = nn.Sequential(*[Block(topology) for _ in range(4)])
    asked, state = options(**more), torch.get_rng_state()
    units, comm = measure(units_of(model), topology, asked)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())
    assert all(module.defer is None for module in model.modules() if hasattr(module, "defer"))
    return units, comm


@pytest.mark.parametrize("grid", [Grid(pp=2), Grid(tp=2), Grid(pp=3)])
def test_every_rank_gets_the_same_answer(grid: Grid) -> None:
    answers = run_on(grid, costs_of_blocks)
    assert all(answer == answers[0] for answer in answers)
    units, comm = answers[0]
    assert (comm > 0) == (grid.pp > 1)
    assert all(unit.forward > 0 and unit.weight_grad > 0 for unit in units)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_equal_units_cost_the_same(precision: str, recompute: str) -> None:
    topology = Topology.init(device="cpu")
    units, _ = costs_of_blocks(topology, precision=precision, recompute=recompute)
    assert units[1] == units[2] != units[0], "the first needs no gradient of its input"
    assert units[3] != units[2], "the last bears the loss"


def test_units_that_are_repeated_are_told_from_those_that_are_not() -> None:
    topology = Topology.init(device="cpu")
    model = nn.Sequential(*[Block(topology) for _ in range(4)])
    asked = options(recompute="full", recompute_every=2)
    units = count_flops(units_of(model), topology, asked).units
    assert units[2].input_grad == units[1].input_grad + units[1].forward
    assert units[2].saved < units[1].saved


def test_what_is_cut_over_tp_is_measured_in_parts() -> None:
    whole, cut = (
        run_on(Grid(tp=2), costs_of_blocks, recompute="full", recompute_partition=partition)
        for partition in (False, True)
    )
    # The sums of two parts are kept with each.
    (_, *whole_inner, _), (_, *cut_inner, _) = whole[0][0], cut[0][0]
    assert [c.saved for c in cut_inner] == [w.saved // 2 + 16 for w in whole_inner]


def test_units_that_differ_in_an_attribute_alone_are_told_apart() -> None:
    model = nn.Sequential(Tagged(1), Tagged(3), Tagged(3), nn.Identity())
    units = count_flops(units_of(model), Topology.init(device="cpu"), options()).units
    product = 2 * 4 * WIDTH * WIDTH
    assert [unit.forward for unit in units] == [product, 3 * product, 3 * product, 0]


def test_a_model_on_a_real_device_keeps_its_values_and_gradients() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    count_flops(units_of(model), Topology.init(device="cpu"), options())
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_values_that_only_init_would_give_are_not_needed() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    with torch.device("meta"):
        model = nn.Sequential(Bare(), Bare())
    fill = partial(nn.init.constant_, val=1.0)
    asked = options(init=lambda name, tensor: fill(tensor))
    units = count_flops(units_of(model), Topology.init(device="cpu"), asked).units
    assert [unit.forward for unit in units] == [2 * 4 * WIDTH * WIDTH] * 2


def costs_of_marked(topology: Topology) -> int:
    """Blocks that differ in an attribute on one rank of tp alone; each has sums over tp."""
    with torch.device("meta"):
        model = nn.Sequential(*[Block(topology) for _ in range(3)])
    for layer, block in enumerate(model):
        block.mark = layer * topology.tp.rank
    return len(measure(units_of(model), topology, options())[0])


def test_ranks_measure_the_same_units_also_where_they_take_them_for_different_ones() -> None:
    assert run_on(Grid(tp=2), costs_of_marked) == [3, 3]
