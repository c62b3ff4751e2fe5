"""Optimizers that look at whole parameters, under every layout, against plain PyTorch."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import (
    Engine,
    Grid,
    Topology,
)
from parallel3d.assemble.accounts import account
from parallel3d.memory import memory, predicted
from tests.engine.cases import (
    Tensors,
    engine,
    error,
    plain,
    same,
    train,
    train_plainly,
)
from tests.engine.whole_cases import (
    NAMES,
    OPTIMIZERS,
    STEPS,
    ZEROS,
    ragged,
    ragged_batch,
    ragged_engine,
    ragged_steps,
)
from tests.world import run_on


def trained(topology: Topology, name: str, **options: Any) -> tuple[Tensors, Any, Tensors]:
    """Initial values, losses and weights, the same at every ZeRO stage."""
    found = []
    for zero in ZEROS:
        mine = engine(
            topology, optimizer=OPTIMIZERS[name][0], zero=zero, zero_reduce="last", **options
        )
        initial = mine.state_dict_whole()
        found.append((initial, train(mine, STEPS), mine.state_dict_whole()))
    for _, losses, weights in found[1:]:
        assert losses == found[0][1] and same(weights, found[0][2])
    return found[0]


def each_trained(topology: Topology) -> dict[str, Any]:
    return {name: trained(topology, name) for name in NAMES}


@pytest.mark.parametrize("layout", ["1x1x1", "1x3x1", "1x1x2", "2x2x1", "1x2x2"])
def test_any_layout_does_what_plain_pytorch_does(layout: str) -> None:
    for name, (initial, found, weights) in run_on(Grid.parse(layout), each_trained)[0].items():
        model = plain(initial)
        expected = train_plainly(model, STEPS, OPTIMIZERS[name][1])
        assert torch.tensor(found) == pytest.approx(torch.tensor(expected), rel=1e-12), name
        assert error(weights, dict(model.state_dict())) < 1e-10, name


def hybrid(topology: Topology) -> dict[str, Tensors]:
    """Shards over two ranks, twice; a reduction in each microbatch."""
    found = {}
    for name in NAMES:
        shard_size = 2 if topology.dp.size == 4 else None
        mine = ragged_engine(topology, name, zero=3, zero_reduce="each", shard_size=shard_size)
        ragged_steps(mine, range(3))
        found[name] = mine.state_dict_whole()
    return found


def test_shards_over_part_of_the_ranks_change_nothing() -> None:
    one, four = (run_on(grid, hybrid)[0] for grid in (Grid(), Grid(dp=4)))
    for name in NAMES:
        assert error(four[name], one[name]) < 1e-12, name


def trained_ragged(topology: Topology) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        every = []
        for zero in ZEROS:
            mine = ragged_engine(topology, name, zero=zero)
            initial = mine.state_dict_whole()
            every.append((initial, ragged_steps(mine, range(3)), mine.state_dict_whole()))
        for other in every[1:]:
            assert every[0][1] == other[1] and same(every[0][2], other[2])
        found[name] = every[0]
    return found


@pytest.mark.parametrize("layout", ["1x3x1", "1x1x3", "2x2x1", "1x2x2"])
def test_slices_that_end_inside_rows_and_padded_blocks_change_nothing(layout: str) -> None:
    """Also with clipping, a schedule of the rate, fused blocks, and a table with padding."""
    found = run_on(Grid.parse(layout), trained_ragged)[0]
    for name, (initial, _, weights) in found.items():
        model = ragged(None).double()
        model.load_state_dict(initial)
        optimizer = OPTIMIZERS[name][1](model.parameters())
        groups = [g for o in getattr(optimizer, "inner", [optimizer]) for g in o.param_groups]
        rate = groups[0]["lr"]
        for step in range(3):
            for group in groups:
                group["lr"] = rate / (step + 1)
            x, target = ragged_batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
        assert error(weights, dict(model.state_dict())) < 1e-10, name


def of_schedules(topology: Topology) -> list[Any]:
    """Losses and weights of each optimizer in each precision, the same under every schedule."""
    schedules = ["1f1b", "zbv"] if topology.pp.size > 1 else ["1f1b"]
    kept = []
    for name, precision in product(NAMES, ["fp64", "bf16", "fp16"]):
        found = [trained(topology, name, schedule=s, precision=precision) for s in schedules]
        for _, losses, weights in found[1:]:
            assert losses == found[0][1] and same(weights, found[0][2])
        kept.append(found[0][1:])
    return kept


def test_no_pipeline_schedule_or_zero_stage_changes_a_bit() -> None:
    one, two = (run_on(grid, of_schedules)[0] for grid in (Grid(dp=2), Grid(pp=2, dp=2)))
    for (losses, weights), (others, other_weights) in zip(one, two, strict=True):
        assert losses == others and same(weights, other_weights)


def state_of(mine: Engine) -> Any:
    return [{k: v.clone() for k, v in s.items()} for s in mine.parts.optimizer.states()]


def saved(topology: Topology, folder: Path) -> dict[str, Any]:
    """6 steps at once, with a checkpoint after 3; a reload of it has the same bits here."""
    found = {}
    for name in NAMES:
        mine = ragged_engine(topology, name)
        ragged_steps(mine, range(3))
        mine.save(folder / name)
        before = state_of(mine)
        results = ragged_steps(mine, range(3, 6))
        again = ragged_engine(topology, name)
        again.load(folder / name)
        for kept, read in zip(before, state_of(again), strict=True):
            assert kept.keys() == read.keys()
            assert all(torch.equal(kept[key], read[key]) for key in kept)
        assert ragged_steps(again, range(3, 6)) == results
        assert same(again.state_dict_whole(), mine.state_dict_whole())
        found[name] = mine.state_dict_whole()
    return found


def loaded(topology: Topology, folder: Path, zero: int) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        mine = ragged_engine(topology, name, zero=zero)
        mine.load(folder / name)
        ragged_steps(mine, range(3, 6))
        found[name] = mine.state_dict_whole()
    return found


@pytest.mark.parametrize(
    ("before", "after", "zero"),
    [("1x3x1", "2x1x2", 0), ("1x1x3", "1x2x1", 1), ("2x1x1", "1x2x2", 1)],
)
def test_a_checkpoint_goes_on_under_another_layout(
    before: str, after: str, zero: int, tmp_path: Path
) -> None:
    unbroken = run_on(Grid.parse(before), saved, folder=tmp_path)[0]
    found = run_on(Grid.parse(after), loaded, folder=tmp_path, zero=zero)[0]
    for name in NAMES:
        assert error(found[name], unbroken[name]) < 1e-10, name


class Head(nn.Module):
    """A matrix that another unit has too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def each_tied(topology: Topology) -> dict[str, Tensors]:
    return {name: tied(topology, name) for name in NAMES}


def tied(topology: Topology, name: str) -> Tensors:
    """The first and the last unit share a matrix; the one between is frozen, so a rank is idle."""
    with torch.device("meta"):
        weight = nn.Parameter(torch.empty(8, 8))
        frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        model = nn.Sequential(Head(weight), frozen, Head(weight))
    mine = engine(
        topology, model, optimizer=OPTIMIZERS[name][0], partition=[1, 2][: topology.pp.size - 1]
    )
    train(mine, 3)
    return mine.state_dict_whole()


def test_ties_and_ranks_without_anything_to_train() -> None:
    whole, *others = (run_on(grid, each_tied)[0] for grid in (Grid(), Grid(pp=3), Grid(dp=2)))
    for other in others:
        for name in NAMES:
            assert error(other[name], whole[name]) < 1e-12


def sent_bytes(topology: Topology) -> list[tuple[int, int, int]]:
    """Of a step: over dp by the ledger, without the count of items; on paper; for the update."""
    found, d = [], topology.dp.size
    for name in NAMES:
        for zero in ZEROS:
            mine = ragged_engine(topology, name, zero=zero)
            for step in range(2):
                mine.parts.ledger.reset()
                ragged_steps(mine, range(step, step + 1))
            sent = account(mine.parts).sent
            dp = mine.parts.ledger.bytes()["dp"] - 2 * 8 * (d - 1) // d
            found.append((dp, sent.over_dp, sent.optimizer))
    return found


@pytest.mark.parametrize("layout", ["1x3x1", "1x2x2", "2x2x1"])
def test_an_update_sends_the_bytes_that_were_predicted(layout: str) -> None:
    found = run_on(Grid.parse(layout), sent_bytes)
    for of_rank in found:
        for by_ledger, on_paper, _ in of_rank:
            assert by_ledger == on_paper
    # Below stage 1 a rank updates everything, and Muon needs nobody.
    update = [any(rank[at][2] for rank in found) for at in range(len(found[0]))]
    asked = [(name, zero) for name in NAMES for zero in ZEROS]
    assert update == [name != "muon" or zero > 0 for name, zero in asked]


def state_bytes(topology: Topology) -> list[Any]:
    found = []
    for name in NAMES:
        mine = ragged_engine(topology, name)
        before = predicted(mine.parts)
        ragged_steps(mine, range(1))
        assert memory(mine.parts) == before
        found.append(before.optimizer)
    return found


def test_the_state_takes_the_bytes_that_were_predicted() -> None:
    """Two averages for LAMB; for Adafactor of a matrix its rows and columns; one for Muon."""
    assert run_on(Grid(), state_bytes)[0] == [
        2 * 8 * 2 * (110 + 600 + 300 + 60 + 10 + 1),
        8 * 2 * (11 + 10 + 10 + 60 + 30 + 10 + 60 + 10 + 1),
        8 * 2 * (110 + 600 + 300 + 2 * (60 + 10 + 1)),
    ]
