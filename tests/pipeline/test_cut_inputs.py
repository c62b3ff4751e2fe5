"""Kept inputs in parts over tp: the bytes, the bits, and inputs that are not the same there."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import ColumnParallelLinear, RowParallelLinear
from parallel3d.comm.host import host_axis
from parallel3d.comm.ledger import Ledger
from parallel3d.pipeline.activations import Activations
from parallel3d.pipeline.cut_inputs import CutInputs
from parallel3d.pipeline.offload import Host
from parallel3d.pipeline.stage import Stage
from parallel3d.topology import Axis, Grid, Topology
from tests.live import Live
from tests.pipeline.units import WIDTH, Apply, Told, gradients_for, linear, stage_of
from tests.world import run_on

ROWS = 63  # odd: the last part is padded
HIDDEN = ROWS * WIDTH * 4


def activation() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)


def layers(axis: Axis) -> list[nn.Module]:
    """A region over tp in pieces: what lies between its layers is another on each rank."""
    torch.manual_seed(0)
    column = ColumnParallelLinear(WIDTH, WIDTH, axis=axis)
    return [linear(), column, nn.GELU(), RowParallelLinear(WIDTH, WIDTH, axis=axis), linear()]


def cut_stage(topology: Topology, modules: list[nn.Module], away: bool = False) -> Stage:
    host = None
    if away:
        host = Host(torch.device("cpu"), host_axis(0))
        host.least = 1
    tp = topology.tp
    return stage_of(modules, Activations("full", tp=tp, cut=CutInputs(tp), host=host))


def trained(stage: Stage, modules: list[nn.Module], x: Tensor) -> list[Tensor]:
    output = stage.forward(0, x, seed=0)
    inputs = stage.backward(0, gradients_for(output))
    return [
        output,
        *inputs,
        *(p.grad for m in modules for p in m.parameters() if p.grad is not None),
    ]


def compare(topology: Topology) -> dict[str, Any]:
    found = {}
    for name in ("full", "cut", "cut, away"):
        modules = layers(topology.tp)
        stage = stage_of(modules, "full")
        if name != "full":
            stage = cut_stage(topology, modules, away="away" in name)
        found[name] = trained(stage, modules, activation())
    return {name: all(map(torch.equal, tensors, found["full"])) for name, tensors in found.items()}


def test_parts_change_no_bit_and_what_differs_over_tp_is_kept_whole() -> None:
    for rank in run_on(Grid(tp=2), compare):
        assert rank == {"full": True, "cut": True, "cut, away": True}


def kept_bytes(tp: int) -> int:
    """Of a microbatch: three parts, and what the parts of each rank should add up to."""
    return 3 * (-(-ROWS * WIDTH // tp) * 4 + tp * 8)


def settled(live: Live, expected: int) -> int:
    """What is kept, once gloo's thread has let go of what was sent, a moment after it was."""
    for _ in range(500):
        if live.bytes() == expected:
            break
        time.sleep(0.01)
    return live.bytes()


def weigh(topology: Topology) -> dict[str, Any]:
    """Bytes kept of microbatches between forward and backward; bytes sent and in what order."""
    ledger = Ledger()
    ledger.tracing = True
    ledger.attach(topology.tp)
    order: list[tuple[int, int]] = []

    def look(unit: int) -> None:
        kinds = [event.kind for event in ledger.trace if event.phase == "issue"]
        order.append((unit, kinds.count("all_gather")))

    stage = cut_stage(topology, [Apply(torch.exp) for _ in range(3)])
    stage.weights = Told(look)
    kept, sent = [], []
    each = kept_bytes(topology.tp.size)
    with Live() as live:
        for k in range(3):
            stage.forward(k, activation(), seed=0)
            kept.append(settled(live, each * (k + 1)))
        sent.append(ledger.bytes()["tp"])
        for k in range(3):
            stage.backward(k, [torch.ones(ROWS, WIDTH)])
        left = settled(live, 0)
    sent.append(ledger.bytes()["tp"])
    return {"kept": kept, "sent": sent, "left": left, "order": order[:3]}


@cache
def weighed(tp: int) -> list[dict[str, Any]]:
    return run_on(Grid(tp=tp), weigh)


@pytest.mark.parametrize("tp", [2, 3])
def test_a_rank_keeps_its_part_and_is_sent_the_others(tp: int) -> None:
    part = -(-ROWS * WIDTH // tp) * 4
    sums = 2 * tp * 8  # bytes of a part's sums and their negatives, asked for once a unit
    for rank in weighed(tp):
        assert rank["kept"] == [kept_bytes(tp) * (k + 1) for k in range(3)]
        asked, all_ = rank["sent"]
        assert asked == 3 * (2 * sums * (tp - 1) // tp)
        assert all_ - asked == 3 * 3 * (tp - 1) * part
        assert rank["left"] == 0


def test_a_unit_is_gathered_while_the_one_after_it_works() -> None:
    for rank in weighed(2):
        assert rank["order"] == [(2, 2), (1, 3), (0, 3)], "a unit, and gathers begun until its end"


def differ_later(topology: Topology) -> str:
    """A unit's input is the same on all ranks once, and then is not."""
    stage = cut_stage(topology, [Apply(torch.exp)])
    for seed in (0, topology.tp.rank):
        torch.manual_seed(seed)
        output = stage.forward(0, torch.randn(ROWS, WIDTH, requires_grad=True), seed=0)
        try:
            stage.backward(0, gradients_for(output))
        except RuntimeError as error:
            return f"{seed} {error} {error.__notes__}"
    return ""


def test_an_input_that_was_the_same_once_is_found_when_it_is_not() -> None:
    for rank, told in enumerate(run_on(Grid(tp=2), differ_later)):
        assert told.startswith(
            f"{rank} unit 0 is given another input on each rank of tp, so it cannot be cut: use "
            f"recompute.partition=false ['in unit 0 (Apply), stage 0']"
        )
