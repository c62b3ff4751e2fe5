"""The stages of ZeRO bit for bit, against plain PyTorch and against torch's own ZeRO 1."""

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


def run(topology: Topology, **options: Any) -> Any:
    """Three steps, an evaluation between two of them: initial weights, numbers, weights."""
    mine = engine(topology, **{"max_grad_norm": 0.05, **options})
    initial, numbers = mine.state_dict_whole(), train(mine, 2)
    mine.eval_step(*share(topology, *batch(7, dtype=torch.float64)))
    return initial, numbers + train(mine, [2]), mine.state_dict_whole()


def stages_agree(topology: Topology, **options: Any) -> list[Any]:
    """Steps are bit-equal inside of each class; the first run of each."""
    firsts = []
    for choices in CLASSES:
        _, numbers, weights = first = run(topology, **choices[0], **options)
        for choice in choices[1:]:
            _, again, others = run(topology, **choice, **options)
            assert numbers == again and same(weights, others), choice
        firsts.append(first)
    return firsts


def each_optimizer(topology: Topology, names: list[str]) -> Any:
    return {name: stages_agree(topology, optimizer=OPTIMIZERS[name]) for name in names}


TIGHT = {"zero": 3, "gather_budget": 5000}  # of about two of four units
CLASSES: list[list[dict[str, Any]]] = [
    [
        {"zero": 1},
        {"zero": 0},
        {"zero": 2, "zero_reduce": "last"},
        {"zero": 3, "zero_reduce": "last"},
        {**TIGHT, "zero_reduce": "last"},
    ],
    [{"zero": 2}, {"zero": 3}, TIGHT, {**TIGHT, "recompute": "full"}],
]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("1x2x1", list(OPTIMIZERS)),
        ("1x2x2", ["AdamW", "RMSprop"]),
        ("2x2x1", ["AdamW", "SGD"]),
        ("1x4x1", ["Adam", "Adagrad"]),
    ],
)
def test_stages_are_bit_equal_in_two_classes_and_equal_torch_under_each_optimizer(
    layout: str, names: list[str]
) -> None:
    runs = run_on(Grid.parse(layout), each_optimizer, names=names)[0]
    for name, firsts in runs.items():
        for initial, results, weights in firsts:
            model = plain(initial)
            expected = train_plainly(model, 3, OPTIMIZERS[name], max_norm=0.05)
            torch.testing.assert_close(results, expected, rtol=1e-12, atol=0)
            assert error(weights, model.state_dict()) < 1e-10, name


def narrow(topology: Topology) -> Any:
    return stages_agree(topology, precision="fp32"), stages_agree(topology, precision="bf16")


def test_stages_are_bit_equal_in_fp32_and_bf16() -> None:
    for found in run_on(Grid(dp=2), narrow):
        for (_, once, _), (_, each, _) in found:
            torch.testing.assert_close(once, each, rtol=1e-5, atol=0)


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]


def under_schedules(topology: Topology) -> Any:
    return [
        [
            run(topology, schedule=name, num_microbatches=4, **choice)
            for choice in (CLASSES[1][0], *CLASSES[1][2:])
        ]
        for name in SCHEDULES
    ]


def test_reducing_each_microbatch_has_the_same_bits_under_every_schedule_and_depth() -> None:
    found = [*run_on(Grid(pp=2, dp=2), under_schedules)[0], [run_on(Grid(dp=2), one_stage)[0]]]
    runs = [each for schedule in found for each in schedule]
    for _, numbers, weights in runs[1:]:
        assert numbers == runs[0][1] and same(weights, runs[0][2])


def one_stage(topology: Topology) -> Any:
    return run(topology, num_microbatches=4, **TIGHT)


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
