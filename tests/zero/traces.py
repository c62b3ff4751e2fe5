"""What happens when: computes, collectives and updates of two steps in one list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel3d import Topology
from tests.engine.cases import WIDTH, engine, train

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


def traced_steps(topology: Topology, microbatches: int, **options: Any) -> list[tuple[str, ...]]:
    """Two steps as (what, unit), where what is also a collective's kind and phase."""
    trace: Trace = []
    model = nn.Sequential(*[Marked(unit, trace) for unit in range(UNITS)])
    optimizer = type("Traced", (Steps,), {"trace": trace})
    options["optimizer"] = lambda groups: optimizer(groups, lr=0.1)
    mine = engine(topology, model, num_microbatches=microbatches, **options)
    mine.parts.ledger.tracing, mine.parts.ledger.trace = True, trace
    trace.clear()
    train(mine, 2)
    return [
        event if len(event) == 2 else (f"{event.kind} {event.phase}", event.tag) for event in trace
    ]


def positions(trace: Trace, what: str, unit: int) -> list[int]:
    found = [(what, unit), (what, f"unit {unit}")]
    return [at for at, event in enumerate(trace) if event in found]
