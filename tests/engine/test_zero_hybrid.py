"""Shards over a part of the dp ranks, and replicas of them over the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d import Grid, Topology
from parallel3d.comm.collectives import all_gather_objects
from parallel3d.comm.lines import open_shards
from parallel3d.memory import memory
from tests.engine.cases import (
    SGD,
    batch,
    blocks,
    engine,
    error,
    plain,
    same,
    share,
    train,
    train_plainly,
)
from tests.world import run_on

STAGES: list[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 2, "zero_reduce": "last"},
    {"zero": 3, "zero_reduce": "last"},
    {"zero": 2, "zero_reduce": "each"},
    {"zero": 3, "zero_reduce": "each", "gather_budget": 0},
]


def axes(topology: Topology, size: int | None) -> Any:
    shards, replicas = open_shards(topology, size, 30.0)
    again = open_shards(topology, size, 30.0)
    assert again[0].ranks == shards.ranks and again[1].ranks == replicas.ranks
    return shards.name, shards.ranks, shards.rank, replicas.ranks, replicas.rank


def test_neighbours_share_and_the_others_are_replicas() -> None:
    found = run_on(Grid(dp=4, tp=2), axes, size=2)
    for rank, (name, shards, at, replicas, which) in enumerate(found):
        dp, tp = divmod(rank, 2)
        assert name == "dp"
        assert shards == tuple(2 * d + tp for d in (0, 1, 2, 3) if d // 2 == dp // 2)
        assert replicas == tuple(2 * d + tp for d in (0, 1, 2, 3) if d % 2 == dp % 2)
        assert shards[at] == replicas[which] == rank
    for size in (None, 4):
        assert run_on(Grid(dp=4), axes, size=size)[3] == ("dp", (0, 1, 2, 3), 3, (0,), 0)
    assert run_on(Grid(dp=4), axes, size=1)[3] == ("dp", (0,), 0, (0, 1, 2, 3), 3)


def hybrid(topology: Topology, size: int) -> Any:
    found = []
    for stage in STAGES:
        mine = engine(topology, shard_size=size, max_grad_norm=0.05, **stage)
        initial, numbers = mine.state_dict_whole(), train(mine, 3)
        copies = [flat.master for flat in mine.parts.shards.trained()]
        for each in all_gather_objects(copies, mine.parts.shards.replicas):
            assert all(map(torch.equal, each, copies)), "replicas differ"
        found.append((initial, numbers, mine.state_dict_whole(), memory(mine.parts)))
    return found


@pytest.mark.report("ByteDance-Seed/VeOmni#184")
@pytest.mark.parametrize("layout", ["1x4x1", "2x4x1"])
@pytest.mark.parametrize("size", [1, 2])
def test_hybrid_shards_equal_plain_torch_at_every_stage(layout: str, size: int) -> None:
    runs = run_on(Grid.parse(layout), hybrid, size=size)[0]
    for initial, numbers, weights, _ in runs:
        model = plain(initial)
        expected = train_plainly(model, 3, max_norm=0.05)
        torch.testing.assert_close(numbers, expected, rtol=1e-12, atol=0)
        assert error(weights, model.state_dict()) < 1e-10
    for first, *others in (runs[:3], runs[3:]):
        for other in others:
            assert other[1] == first[1] and same(other[2], first[2])


def owned(topology: Topology, size: int | None) -> Any:
    """Bytes of the second step on dp, elements of the buffers, and what is kept."""
    mine = engine(topology, optimizer=SGD, zero=3, shard_size=size, zero_reduce="last")
    x, target = share(topology, *batch(0))
    mine.train_step(x, target)
    mine.parts.ledger.reset()
    mine.train_step(x, target)
    elements = sum(flat.length for flat in mine.parts.shards.trained())
    return mine.parts.ledger.bytes()["dp"], elements, memory(mine.parts)


def test_bytes_and_memory_are_those_of_a_shard_and_of_its_replicas() -> None:
    """Zhao et al. 2023, "PyTorch FSDP", section 3.2.2: over s of d ranks, k = d / s replicas."""
    for sent, elements, kept in run_on(Grid(dp=4), owned, size=2):
        items = 2 * 8 * 3 // 4
        inside, across = 2 * elements // 2, 2 * elements // 2 // 2
        assert sent == 8 * (inside + across) + items
        assert kept.parameters == kept.gradients == 8 * elements // 2
    assert run_on(Grid(dp=4), owned, size=None)[0][2].parameters == 8 * elements // 4


def saved(topology: Topology, folder: Path, loads: bool, **stage: Any) -> Any:
    mine = engine(topology, blocks(topology), seed=int(loads), **stage)
    if loads:
        mine.load(folder)
    train(mine, [mine.step, mine.step + 1])
    if not loads:
        mine.save(folder)
        train(mine, [mine.step, mine.step + 1])
    return mine.state_dict_whole()


def test_a_checkpoint_of_hybrid_shards_is_that_of_any_layout(tmp_path: Path) -> None:
    whole = run_on(Grid(dp=4), saved, folder=tmp_path, loads=False, zero=3, shard_size=2)[0]
    for layout, stage in (("1x4x1", {"zero": 2}), ("2x1x2", {}), ("1x4x1", {"shard_size": 2})):
        again = run_on(Grid.parse(layout), saved, folder=tmp_path, loads=True, **stage)[0]
        assert error(again, whole) < 1e-10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shard_size": 3},
            "zero.shard_size = 3 does not divide topology.dp = 2: set zero.shard_size=2",
        ),
        (
            {"shard_size": 1, "zero": 0},
            "shard_size = 1 says over how many .* set zero.stage=1 or more",
        ),
    ],
)
def test_a_size_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    run_on(Grid(dp=2), refused, options=options, message=message)


def refused(topology: Topology, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(topology, **options)
