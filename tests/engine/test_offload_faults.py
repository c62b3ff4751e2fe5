"""Updates on the host beside the steps: who waits for whom, and what a failure leaves."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Grid, Topology
from tests.engine.cases import WIDTH, engine, train
from tests.engine.offload_cases import made, places
from tests.world import run_on


def state_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


class Waits(torch.optim.SGD):
    """Its update of the last unit ends when the first unit's next forward has begun."""

    begun = threading.Event()
    last = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        if group["params"][0].numel() == self.last and not self.begun.wait(20):
            raise RuntimeError("the first unit's forward waited for the last unit's update")
        super().step(closure)


class First(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        Waits.begun.set()
        return super().forward(x)


class Last(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        Waits.begun.clear()
        return super().forward(x)


def waits(topology: Topology, folder: Path) -> None:
    for zero, place in zip((1, 3), places(folder), strict=True):
        units = First(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Last(WIDTH, 4 * WIDTH, bias=False)
        model, make = nn.Sequential(*units).double(), partial(Waits, lr=0.1)
        loss_fn = state_loss
        Waits.last = 0
        mine = engine(topology, model, optimizer=make, loss_fn=loss_fn, zero=zero, offload=place)
        Waits.last = 2 * WIDTH * WIDTH
        train(mine, 3)
        Waits.begun.set()
        mine.parts.shards.settle()


def test_a_forward_waits_for_its_own_units_update_only(tmp_path: Path) -> None:
    run_on(Grid(dp=2), waits, folder=tmp_path)


def test_an_error_in_an_update_is_raised_where_the_unit_is_needed() -> None:
    broken: list[bool] = []

    class Breaks(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if broken:
                raise RuntimeError("broken")
            super().step(closure)

    with Topology.init() as topology:
        mine = engine(topology, optimizer=Breaks, offload={"optimizer": "cpu"})
        broken.append(True)
        train(mine, 1)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken"):
                train(mine, [1])


def on_a_full_disk(topology: Topology, folder: Path) -> str:
    if topology.rank == 1:
        usage = shutil.disk_usage(folder)._replace(free=1000)
        shutil.disk_usage = lambda path: usage  # type: ignore[assignment, return-value]
    with pytest.raises(OSError if topology.rank == 1 else RuntimeError) as caught:
        made(topology, offload=places(folder)[1])
    return str(caught.value)


def test_a_full_disk_is_told_on_every_rank(tmp_path: Path) -> None:
    for text in run_on(Grid(dp=2), on_a_full_disk, folder=tmp_path):
        assert "No space left on device" in text and "the disk has 1,000 left" in text
        assert "set offload.path to a larger disk, or offload.optimizer=cpu" in text
