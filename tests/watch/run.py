"""A training run, a script, in which something happens to one rank: see ``test_kill``."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel3d import ColumnParallelLinear, Engine, RowParallelLinear, Topology
from parallel3d.topology import Grid


class Killer:
    """Counts all that it observes, and at the event of a given number does what it was told."""

    def __init__(self, events: int, how: str) -> None:
        self.left, self.how = events, how

    def hear(self, *event: Any) -> None:
        self.left -= 1
        if self.left < 0 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left < 0 and self.how == "raise":
            raise ValueError("planted")
        if self.left < 0 and self.how == "leave":
            raise SystemExit(0)

    waits = begins = ends = hear


def build(topology: Topology) -> nn.Sequential:
    def block() -> nn.Sequential:
        return nn.Sequential(
            ColumnParallelLinear(8, 16, axis=topology.tp),
            nn.Tanh(),
            RowParallelLinear(16, 8, axis=topology.tp),
        )

    with torch.device("meta"):
        return nn.Sequential(*[block() for _ in range(4)])


def main(layout: str, victim: str, events: str, init_method: str, how: str = "kill") -> None:
    grid = Grid.parse(layout)
    with Topology.init(
        grid.pp, grid.dp, grid.tp, timeout=30.0, device="cpu", init_method=init_method
    ) as topology:
        engine = Engine(
            build(topology),
            topology,
            loss_fn=nn.MSELoss(reduction="sum"),
            optimizer=partial(torch.optim.SGD, lr=0.1),
            num_microbatches=4,
            timeout=3.0 if how == "sleep" else 10.0,
        )
        if topology.rank == int(victim) and how != "sleep":
            killer = Killer(int(events), how)
            engine.parts.interpreter.observers.append(killer)
            for axis in (topology.world, topology.pp, topology.dp, topology.tp):
                axis.observers.append(killer.hear)
        for step in range(1000):
            if step == 1 and topology.rank == int(victim) and how == "sleep":
                time.sleep(1000)
            engine.train_step(torch.ones(4, 8), torch.ones(4, 8))
            engine.eval_step(torch.ones(4, 8), torch.ones(4, 8))
            engine.save(f"step-{step}")


if __name__ == "__main__":
    main(*sys.argv[1:])
