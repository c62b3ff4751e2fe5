"""What a caller does to a step from outside, and batches that differ between ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import ColumnParallelLinear, Engine, Grid, Topology
from tests.engine.cases import batch, engine, same, share, train
from tests.world import run_on


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_autocast_around_a_step_is_refused(recompute: str) -> None:
    """Its cache of casts would outlive an update, so that training stands still."""
    with Topology.init() as topology:
        mine = engine(topology, recompute=recompute)
        x, target = batch(0, dtype=torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            for step in (mine.train_step, mine.eval_step):
                with pytest.raises(ValueError, match=r"autocast is on .* precision='bf16'"):
                    step(x, target)
        train(mine, 1)


def test_a_step_in_inference_mode_is_refused_and_an_evaluation_is_not() -> None:
    with Topology.init() as topology:
        mine = engine(topology)
        x, target = batch(0, dtype=torch.float64)
        expected = mine.eval_step(x, target).loss
        with torch.inference_mode():
            with pytest.raises(ValueError, match="inference_mode is on around train_step"):
                mine.train_step(x, target)
            assert mine.eval_step(x, target).loss == expected
        train(mine, 1)


@pytest.mark.parametrize("factor", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("offload", [None, {"optimizer": "cpu"}])
def test_a_rate_that_spoils_the_weights_is_refused(factor: float, offload: Any) -> None:
    with Topology.init() as topology:
        mine = engine(topology, lr_schedule=lambda step: factor if step else 1.0, offload=offload)
        train(mine, 1)
        before = mine.state_dict_whole()
        with pytest.raises(ValueError, match=rf"lr_schedule\(1\) = {factor}: it gives a factor"):
            train(mine, 1)
        assert same(mine.state_dict_whole(), before)


def test_a_negative_number_of_items_is_refused() -> None:
    with Topology.init() as topology:
        mine = engine(topology, num_items=lambda target: -4)
        before = mine.state_dict_whole()
        with pytest.raises(ValueError, match="num_items gave -8 for the batch: 0 is the least"):
            train(mine, 1)
        assert same(mine.state_dict_whole(), before)


WRONG: list[dict[str, Any]] = [
    {"num_microbatches": "2"},
    {"num_microbatches": 1.5},
    {"num_microbatches": True},
    {"num_microbatches": None},
    {"num_microbatches": 0},
    {"num_chunks": "1"},
    {"gather_budget": "x"},
    {"shard_size": "1"},
    {"zero": True},
    {"recompute_every": None},
    {"max_grad_norm": "1"},
    {"max_bad_steps": -1},
    {"timeout": 0},
    {"timeout": "x"},
    {"compile": "x"},
    {"compile": 2},
    {"recompute_partition": 3},
    {"memory_limit": "x"},
    {"fp16": 1},
    {"offload": 1},
    {"param_groups": 1},
    {"lr_schedule": 0.1},
    {"init": "zeros"},
    {"num_items": 3},
]


@pytest.mark.parametrize("given", WRONG, ids=str)
def test_an_argument_of_another_kind_is_refused_by_name(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with Topology.init() as topology, pytest.raises(ValueError) as caught:
        engine(topology, **given)
    assert str(caught.value).startswith(f"{name} = ") and str(value).lower() in str(
        caught.value
    ).lower().replace("null", "none")


def evaluates(topology: Topology, budget: int) -> list[float]:
    """Evaluations of batches of which some dp ranks have few rows, or none, first and later."""
    mine = engine(topology, zero=3, num_microbatches=4, gather_budget=budget)
    losses = []
    for rows in ([7, 0, 1], [0, 5, 2], [0, 0, 1]):
        x, target = batch(0, sum(rows), torch.float64)
        at, d = topology.dp.rank, topology.dp.size
        mine_of = [part[at] for part in (x.split(_over(rows, d)), target.split(_over(rows, d)))]
        losses.append(mine.eval_step(*mine_of).loss)
        train(mine, 1, size=24)
    return losses


def _over(rows: list[int], ranks: int) -> list[int]:
    """Rows of three ranks, given to so many."""
    return [sum(rows[at] for at in range(3) if at % ranks == rank) for rank in range(ranks)]


@pytest.mark.parametrize("layout", ["1x2x1", "1x3x1", "2x2x1"])
@pytest.mark.parametrize("budget", [0, 8192, 2**28])
def test_an_evaluation_may_give_each_rank_another_number_of_rows(layout: str, budget: int) -> None:
    grid = Grid.parse(layout)
    alone = run_on(Grid(), evaluates, budget=budget)[0]
    for found in run_on(grid, evaluates, budget=budget):
        assert found[0] == pytest.approx(alone[0], rel=1e-12)


def lists(topology: Topology) -> str:
    """Of one rank only, and of unequal lengths; on every rank."""
    mine = engine(topology, zero=3, gather_budget=0)
    x, target = share(topology, *batch(0, 16, torch.float64))
    parts = list(zip(x.split(2), target.split(2), strict=True))
    mine.train_step(parts)
    mine.train_step(parts[:2])
    mine.train_step(*((parts[:2], None) if topology.dp.rank else (x, target)))
    with pytest.raises(ValueError) as caught:
        mine.train_step(parts[topology.dp.rank :])
    return str(caught.value)


def test_lists_of_microbatches_of_unequal_lengths_are_refused_in_any_step() -> None:
    for told in run_on(Grid(dp=2), lists):
        assert told == "ranks were given 3, 4 microbatches: every dp rank runs the same number"


class Twice(nn.Module):
    """A layer that one unit uses twice."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.layer = ColumnParallelLinear(16, 16, axis=topology.tp, gather_output=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(torch.tanh(self.layer(x)))


def of_schedule(topology: Topology, precision: str) -> list[Any]:
    found = []
    for schedule in ("1f1b", "zb-h1", "zbv"):
        with torch.device("meta"):
            model = nn.Sequential(*[Twice(topology) for _ in range(4)])
        mine: Engine = engine(topology, model, precision=precision, schedule=schedule, zero=0)
        losses = [mine.train_step(*_rows(step)) for step in range(3)]
        found.append((losses, mine.state_dict_whole()))
    return found


def _rows(step: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step))
    return x, target


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_layer_used_twice_has_the_same_bits_under_a_split_backward(precision: str) -> None:
    """Uses are added as wide as the gradient, as autograd does."""
    (losses, weights), *others = run_on(Grid(pp=2), of_schedule, precision=precision)[0]
    for other, kept in others:
        assert other == losses and same(kept, weights)


@pytest.mark.parametrize(
    "fp16", [{"window": "x"}, {"initial_scale": None}, {"window": 2.5}, {"scale": "8"}], ids=str
)
def test_options_of_the_loss_scale_are_of_their_kinds(fp16: dict[str, Any]) -> None:
    ((name, _),) = fp16.items()
    with Topology.init() as topology, pytest.raises(ValueError, match=rf"fp16\.{name} = .* is not"):
        engine(topology, precision="fp16", fp16=fp16)


def later_lists(topology: Topology) -> None:
    mine = engine(topology)
    train(mine, 1)
    x, target = batch(0, dtype=torch.float64)
    parts = list(zip(x.split(2), target.split(2), strict=True))
    mine.train_step(parts[:2])
    with pytest.raises(ValueError, match="a list of 4 microbatches after steps without lists"):
        mine.train_step(parts)


def test_a_list_after_steps_without_has_as_many_microbatches() -> None:
    run_on(Grid(dp=2), later_lists)


def test_no_limit_may_be_infinite() -> None:
    with Topology.init() as topology:
        free, limited = engine(topology), engine(topology, max_grad_norm=math.inf)
        assert train(limited, 2) == train(free, 2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_of_a_step_that_was_refused_at_its_end_are_not_in_the_next(zero: int) -> None:
    with Topology.init() as topology:
        rate = [math.nan]
        mine, other = (engine(topology, zero=zero, lr_schedule=lambda step: rate[0]) for _ in "ab")
        with pytest.raises(ValueError, match="it gives a factor of the learning rate"):
            train(mine, 1)
        rate[0] = 1.0
        assert train(mine, 2) == train(other, 2)
