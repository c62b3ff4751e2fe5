"""Several gloo ranks on one GPU: the same numbers as on the CPU. Run where there is a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d import ColumnParallelLinear, Engine, Grid, RowParallelLinear, Topology
from tests.world import run_on

pytestmark = pytest.mark.gpu


def losses(topology: Topology, **options: Any) -> list[tuple[float, float]]:
    """Three steps of a small model; loss and gradient norm of each."""

    def block() -> nn.Sequential:
        up = ColumnParallelLinear(32, 128, axis=topology.tp)
        down = RowParallelLinear(128, 32, axis=topology.tp)
        return nn.Sequential(nn.LayerNorm(32), up, nn.GELU(), down)

    with torch.device("meta"):
        model = nn.Sequential(*[block() for _ in range(4)])
    engine = Engine(
        model,
        topology,
        loss_fn=nn.MSELoss(reduction="sum"),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        num_microbatches=2,
        precision="fp64",
        max_grad_norm=1.0,
        **options,
    )
    x = torch.randn(8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    share = torch.tensor_split(x, topology.dp.size)[topology.dp.rank]
    steps = [engine.train_step(share, share.roll(1, 1)) for _ in range(3)]
    return [(step.loss, step.grad_norm) for step in steps]


@pytest.mark.parametrize("grid", [Grid(), Grid(2, 2, 1), Grid(1, 2, 2), Grid(2, 2, 2)], ids=str)
def test_ranks_on_one_card_train_to_the_numbers_of_a_cpu(grid: Grid) -> None:
    expected = run_on(Grid(), losses)[0]
    for seen in run_on(grid, losses, device="cuda", timeout=120):
        torch.testing.assert_close(
            torch.tensor(seen, dtype=torch.float64),
            torch.tensor(expected, dtype=torch.float64),
            rtol=1e-10,
            atol=0,
        )


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offload_on_a_card_gives_the_numbers_of_a_cpu(
    where: str, zero: int, tmp_path: Path
) -> None:
    expected = run_on(Grid(), losses)[0]
    offload = {"optimizer": where, "path": str(tmp_path) if where == "disk" else None}
    offload["parameters"] = "cpu" if zero == 3 else "none"
    for seen in run_on(Grid(dp=2), losses, device="cuda", timeout=120, zero=zero, offload=offload):
        torch.testing.assert_close(
            torch.tensor(seen, dtype=torch.float64),
            torch.tensor(expected, dtype=torch.float64),
            rtol=1e-10,
            atol=0,
        )
