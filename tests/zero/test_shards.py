from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel3d import Engine, Grid, Topology
from parallel3d.placement import Replicate
from parallel3d.topology import Axis
from parallel3d.zero.flat import ALIGNMENT, Flat, Held
from parallel3d.zero.shards import Shards
from tests.engine.cases import SGD, WIDTH, batch, engine, share, train
from tests.world import run_on

UNITS = 4
Trace = list[Any]


class Mark(Function):
    """The identity, which notes when the backward that it begins starts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, unit: int, trace: Trace) -> Tensor:
        ctx.unit, ctx.trace = unit, trace
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.trace.append(("backward", ctx.unit))
        return grad, None, None


class Marked(nn.Module):
    def __init__(self, unit: int, trace: Trace) -> None:
        super().__init__()
        self.linear, self.unit, self.trace = nn.Linear(WIDTH, WIDTH), unit, trace

    def forward(self, x: Tensor) -> Tensor:
        self.trace.append(("forward", self.unit))
        return Mark.apply(self.linear(x), self.unit, self.trace)


class Steps(torch.optim.SGD):
    trace: Trace

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.trace.append(("update", 0))
        super().step(closure)


def traced_steps(topology: Topology, zero: int, microbatches: int) -> list[tuple[str, ...]]:
    """Two steps as (what, unit), where what is also a collective's kind and phase."""
    trace: Trace = []
    model = nn.Sequential(*[Marked(unit, trace) for unit in range(UNITS)])
    optimizer = type("Traced", (Steps,), {"trace": trace})
    options = {"optimizer": lambda groups: optimizer(groups, lr=0.1)}
    mine = engine(topology, model, zero=zero, num_microbatches=microbatches, **options)
    mine.parts.ledger.tracing, mine.parts.ledger.trace = True, trace
    trace.clear()
    train(mine, 2)
    return [
        event if len(event) == 2 else (f"{event.kind} {event.phase}", event.tag) for event in trace
    ]


def positions(trace: Trace, what: str, unit: int) -> list[int]:
    found = [(what, unit), (what, f"unit {unit}")]
    return [at for at, event in enumerate(trace) if event in found]


@pytest.mark.report("facebookresearch/fairscale#517")
@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_reduction_runs_beside_the_backward_of_the_unit_before(
    zero: int, microbatches: int
) -> None:
    for trace in run_on(Grid(dp=2), traced_steps, zero=zero, microbatches=microbatches):
        for unit in range(UNITS):
            issued = positions(trace, "reduce_scatter issue", unit)
            waited = positions(trace, "reduce_scatter wait", unit)
            mine = positions(trace, "backward", unit)[microbatches - 1 :: microbatches]
            updates = positions(trace, "update", 0)
            assert len(issued) == len(waited) == len(updates) == 2, "once a step"
            for step in range(2):
                assert mine[step] < issued[step] < waited[step] < updates[step]
                if unit > 0:
                    before = positions(trace, "backward", unit - 1)
                    start = before[microbatches * (step + 1) - 1]
                    assert issued[step] < start < waited[step]


def test_new_values_are_gathered_ahead_of_the_forward_that_needs_them() -> None:
    for trace in run_on(Grid(dp=2), traced_steps, zero=1, microbatches=1):
        (update, _) = positions(trace, "update", 0)
        for unit in range(UNITS):
            issued, waited = (
                positions(trace, f"all_gather {p}", unit)[0] for p in ("issue", "wait")
            )
            needed = positions(trace, "forward", unit)[1]
            assert update < issued < positions(trace, "forward", 0)[1]
            assert issued < waited < needed
            if unit > 0:
                assert waited > positions(trace, "forward", unit - 1)[1], "waited for too early"


def test_stage_0_gathers_gradients_before_the_update_and_no_parameters() -> None:
    for trace in run_on(Grid(dp=2), traced_steps, zero=0, microbatches=1):
        for unit in range(UNITS):
            waited = positions(trace, "all_gather wait", unit)
            updates = positions(trace, "update", 0)
            assert len(waited) == 2
            assert all(a < b for a, b in zip(waited, updates, strict=True))


def bytes_of_a_step(topology: Topology, **options: Any) -> tuple[int, int, int]:
    """Sent on dp in the second step; elements of the flat buffers, and of their parameters."""
    mine: Engine = engine(topology, optimizer=SGD, **options)
    x, target = share(topology, *batch(0))
    mine.train_step(x, target)
    mine.parts.ledger.reset()
    mine.train_step(x, target)
    flats = mine.parts.shards.trained()
    count = sum(
        parameter.numel() for unit in mine.parts.units for parameter in unit.module.parameters()
    )
    return mine.parts.ledger.bytes()["dp"], sum(len(flat.data) for flat in flats), count


@pytest.mark.parametrize(
    ("layout", "options", "width"),
    [
        ("1x2x1", {"zero": 0, "precision": "fp32"}, (4, 4)),
        ("1x2x1", {"zero": 1, "precision": "fp32"}, (4, 4)),
        ("1x3x1", {"zero": 1, "precision": "bf16"}, (4, 2)),
        ("2x2x1", {"zero": 1, "precision": "fp64"}, (8, 8)),
    ],
)
def test_bytes_of_a_step_are_the_lower_bound_of_the_padded_buffers(
    layout: str, options: dict[str, Any], width: tuple[int, int]
) -> None:
    grid = Grid.parse(layout)
    for sent, elements, parameters in run_on(grid, bytes_of_a_step, **options):
        items = 2 * 8 * (grid.dp - 1) // grid.dp
        assert sent == elements * sum(width) * (grid.dp - 1) // grid.dp + items
        # 6 parameters a unit: each is padded to a border, and the buffer to one of each rank.
        units = 4 // grid.pp
        assert 0 <= elements - parameters < units * ALIGNMENT * (6 + grid.dp)


def shards(frozen: Any = None) -> tuple[Shards, nn.Parameter]:
    parameter = nn.Parameter(torch.ones(3))
    axis = Axis.single("dp")
    held = [Held("w", parameter, Replicate(), 0, 0)]
    flat = Flat(held, axis, torch.device("cpu"), dtype=torch.float32, stage=1)
    return Shards({0: [flat]}, frozen=frozen), parameter


def test_gradients_are_set_to_zero_in_place() -> None:
    mine, parameter = shards()
    assert parameter.grad is not None
    kept, _ = parameter.grad, parameter.grad.fill_(2.0)
    mine.after_backward(0, 0, reduce=True)
    mine.abandon()
    assert parameter.grad is kept and kept.count_nonzero() == 0
    mine.after_backward(0, 0, reduce=False)


@pytest.mark.report("deepspeedai/DeepSpeed#5439")
def test_a_parameter_that_was_unfrozen_is_found() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    mine, _ = shards({0: [("0.bias", frozen)]})
    mine.after_backward(0, 0, reduce=False)
    frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match="0.bias was unfrozen after the engine was built"):
        mine.after_backward(0, 0, reduce=False)


def test_a_buffer_that_others_share_may_be_loaded_but_not_changed_by_its_unit() -> None:
    buffer = torch.zeros(2)
    mine = Shards({}, fixed={3: [("3.count", buffer)]})
    mine.after_backward(3, 0, reduce=False)
    buffer.add_(1)
    mine.after_backward(2, 0, reduce=False)
    with pytest.raises(RuntimeError, match="3.count was changed by its unit"):
        mine.after_backward(3, 0, reduce=False)
    mine.publish()
    mine.after_backward(3, 0, reduce=False)
