"""ZeRO 0 and 1 bit for bit, against plain PyTorch and against torch's own ZeRO 1."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d import Grid, Topology
from parallel3d.comm.collectives import all_reduce
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

OPTIMIZERS: dict[str, Any] = {
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, fused=True, weight_decay=0.1),
    "SGD": SGD,
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
}


def stages_agree(topology: Topology, **options: Any) -> Any:
    """Steps under ZeRO 0 and 1 are bit-equal; those of ZeRO 1."""
    found = []
    for zero in (0, 1):
        mine = engine(topology, zero=zero, max_grad_norm=0.05, **options)
        initial = mine.state_dict_whole()
        found.append((initial, train(mine, 3), mine.state_dict_whole()))
    (_, losses, weights), (_, again, other) = found
    assert losses == again and same(weights, other)
    return found[1]


def each_optimizer(topology: Topology, names: list[str]) -> Any:
    return {name: stages_agree(topology, optimizer=OPTIMIZERS[name]) for name in names}


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("1x2x1", list(OPTIMIZERS)),
        ("1x2x2", ["AdamW", "RMSprop"]),
        ("2x2x1", ["AdamW", "SGD"]),
        ("1x4x1", ["Adam", "Adagrad"]),
    ],
)
def test_zero_0_and_1_are_bit_equal_and_equal_torch_under_each_optimizer(
    layout: str, names: list[str]
) -> None:
    runs = run_on(Grid.parse(layout), each_optimizer, names=names)[0]
    for name, (initial, results, weights) in runs.items():
        model = plain(initial)
        expected = train_plainly(model, 3, OPTIMIZERS[name], max_norm=0.05)
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=0)
        assert error(weights, model.state_dict()) < 1e-10, name


def narrow(topology: Topology) -> Any:
    return stages_agree(topology, precision="fp32"), stages_agree(topology, precision="bf16")


def test_zero_0_and_1_are_bit_equal_in_fp32_and_bf16() -> None:
    run_on(Grid(dp=2), narrow)


def beside_torchs(topology: Topology) -> float:
    """Largest difference from torch's own ZeRO 1 after 3 steps; sharded over the same ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, by its own import
        from torch.distributed.optim import ZeroRedundancyOptimizer

    mine = engine(topology)
    weights = mine.state_dict_whole()
    model = blocks(None).double()
    if topology.rank == 0:
        model.load_state_dict(weights)
    for parameter in model.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    theirs = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.1
    )
    for step in range(3):
        x, target = share(topology, *batch(step, dtype=torch.float64))
        theirs.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            all_reduce(parameter.grad, topology.world).div_(2)
        theirs.step()
    train(mine, 3)
    found = mine.state_dict_whole()
    return error(found, model.state_dict()) if topology.rank == 0 else 0.0


def test_zero_1_equals_torchs_zero_redundancy_optimizer() -> None:
    assert max(run_on(Grid(dp=2), beside_torchs)) < 1e-10
