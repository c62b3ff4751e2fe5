from __future__ import annotations

from functools import partial

import torch
from torch import nn

from parallel3d import Engine, Grid, Topology
from parallel3d.memory import Memory, memory, predicted
from tests.engine.cases import SGD, engine, train
from tests.world import run_on

PADDED = 128  # elements of a buffer of nn.Linear(8, 8): weight and bias at multiples of 64


def test_kinds_are_counted_once_and_masters_with_the_optimizer() -> None:
    shared = nn.Linear(8, 8).requires_grad_(False)
    model = nn.Sequential(shared, nn.Linear(8, 8), nn.Linear(8, 8), shared)
    with Topology.init() as topology:
        mine = engine(topology, model, precision="bf16", optimizer=SGD)
        before = memory(mine.parts)
        assert before.parameters == (2 * PADDED + 72) * 2
        assert before.gradients == 2 * PADDED * 4
        assert before.optimizer == 2 * PADDED * 4
        train(mine, 1)
        assert memory(mine.parts) == before._replace(optimizer=2 * 2 * PADDED * 4)


def test_masters_that_are_the_parameters_cost_nothing_and_a_tie_only_gradients() -> None:
    shared = nn.Linear(8, 8)
    with Topology.init() as topology:
        mine = engine(topology, nn.Sequential(shared, nn.Tanh(), shared), optimizer=torch.optim.SGD)
        kept = memory(mine.parts)
        # Weight and bias lie apart, since each is tied.
        assert kept == (PADDED * 8, 2 * PADDED * 8, 0)


def before_and_after(topology: Topology) -> tuple[Memory, Memory]:
    engine = Engine(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)),
        topology,
        loss_fn=nn.MSELoss(reduction="sum"),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
    )
    expected = predicted(engine.parts)
    x = torch.ones(4, 8)
    engine.train_step(x, x[:, :1])
    return expected, memory(engine.parts)


def test_what_is_predicted_at_the_start_is_kept_after_a_step_but_for_counters() -> None:
    for expected, kept in run_on(Grid(dp=2), before_and_after):
        assert expected[:2] == kept[:2]
        assert 0 <= kept.optimizer - expected.optimizer < 64
