"""Faults between layouts and between ranks that no other file holds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallel3d import ColumnParallelLinear, Engine, Grid, Topology
from tests.start import start
from tests.world import run_on


def engine(topology: Topology, precision: str = "fp32") -> Engine:
    """A fused layer of 3 blocks of 4 rows; row r of block b holds 100 b + r."""

    def rows(name: str, tensor: Tensor) -> None:
        if tensor.ndim == 2 and tensor.shape[0] == 12:
            numbers = torch.arange(12)
            tensor.copy_((numbers // 4 * 100 + numbers % 4).float()[:, None].expand(12, 4))

    with torch.device("meta"):
        fused = ColumnParallelLinear(4, 12, False, axis=topology.tp, blocks=3, gather_output=True)
        model = nn.Sequential(fused, nn.Linear(12, 2))
    return Engine(
        model,
        topology,
        loss_fn=nn.MSELoss(reduction="sum"),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        precision=precision,
        init=rows,
    )


def evaluated(topology: Topology, precision: str) -> float:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)
    return engine(topology, precision).eval_step(x, target).loss


@pytest.mark.report("deepspeedai/DeepSpeed#3316")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_evaluation_loss_is_the_last_stages_on_every_rank(precision: str) -> None:
    (single,) = run_on(Grid(), evaluated, precision=precision)
    assert run_on(Grid(pp=2), evaluated, precision=precision) == [single] * 2
    assert single > 0


def saved(topology: Topology, folder: str) -> None:
    engine(topology).save(folder)


def loaded(topology: Topology, folder: str) -> list[float]:
    made = engine(topology)
    weight = made.parts.units[0].module.weight
    weight.data.zero_()
    made.load(folder)
    made.parts.shards.settle()
    column: list[float] = weight[:, 0].tolist()
    return column


@pytest.mark.report("hpcaitech/ColossalAI#817")
@pytest.mark.report("sgl-project/sglang#34529")
def test_a_fused_layer_loads_its_part_of_each_block_under_another_tp(tmp_path: Path) -> None:
    run_on(Grid(), saved, folder=str(tmp_path / "a"))
    assert run_on(Grid(tp=2), loaded, folder=str(tmp_path / "a")) == [
        [0, 1, 100, 101, 200, 201],
        [2, 3, 102, 103, 202, 203],
    ]
    run_on(Grid(tp=2), saved, folder=str(tmp_path / "b"))
    (whole,) = run_on(Grid(), loaded, folder=str(tmp_path / "b"))
    assert whole == [100 * block + row for block in range(3) for row in range(4)]


SCRIPT = """
import torch
from parallel3d import Topology
from parallel3d.comm.collectives import all_reduce

with Topology.init() as topology:
    if topology.rank == 1:
        raise RuntimeError("this rank has a fault")
    all_reduce(torch.ones(1), topology.world)
"""


@pytest.mark.report("mlc-ai/pith-train#31")
@pytest.mark.report("pytorch/pytorch#146371")
def test_a_rank_that_fails_while_another_waits_ends_both_with_its_traceback(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = start(["script.py"], 2, cwd=tmp_path, grace=30)
    assert done.codes == (1, 1), "each ended by itself, with an error"
    assert "this rank has a fault" in done.output
