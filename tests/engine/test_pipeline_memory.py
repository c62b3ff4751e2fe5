"""What a pipeline rank keeps is bounded by what is in flight; what it sends may be of any size."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Engine
from parallel3d.topology import Grid, Topology
from tests.engine.trials import Trial, engine_of
from tests.world import run_on

COUNTS = (1, 4, 12)


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])


class Alive:
    """Counts tensors as long as somebody keeps them, and the most at a time."""

    def __init__(self) -> None:
        self.tensors: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.peak = 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        self.tensors.update(tensors)

    def look(self) -> None:
        self.peak = max(self.peak, len(self.tensors))


class Watched:
    """A channel that counts the messages whose tensors are still kept at this end."""

    def __init__(self, channel: Any) -> None:
        self.channel, self.sent, self.received = channel, Alive(), Alive()

    def send(self, tensors: Sequence[Tensor]) -> None:
        self.sent.add(tensors)
        self.channel.send(tensors)
        self.sent.look()

    def post(self, buffers: Sequence[Tensor]) -> list[Any]:
        self.received.add(buffers)
        self.received.look()
        return self.channel.post(buffers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)


def watch(engine: Engine) -> list[Watched]:
    watched = []
    for border in engine.parts.interpreter.borders.values():
        border.activations = Watched(border.activations)
        border.gradients = Watched(border.gradients)
        watched += [border.activations, border.gradients]
    return watched


def saved_in(engine: Engine, num_microbatches: int) -> int:
    """The most tensors that autograd keeps at a time during a step of one sample a microbatch."""
    alive = Alive()

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        alive.add([kept])
        alive.look()
        return kept

    x = torch.ones(num_microbatches, 1, 8, dtype=torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        engine.train_step([(each, each) for each in x])
    assert len(alive.tensors) == 0, "something is kept after the step"
    return alive.peak


def peaks(topology: Topology) -> tuple[list[int], list[int], list[int]]:
    """Saved tensors for each count, and for the largest the messages kept at either end."""
    engine = engine_of(topology, Trial(layers, []))
    saved_in(engine, 1)
    saved = [saved_in(engine, m) for m in COUNTS[:-1]]
    watched = watch(engine)
    saved.append(saved_in(engine, COUNTS[-1]))
    return saved, [each.sent.peak for each in watched], [each.received.peak for each in watched]


@pytest.mark.report("pytorch/pytorch#128910")
@pytest.mark.report("marin-community/marin#6532")
@pytest.mark.report("PaddlePaddle/Paddle#34483")
def test_a_stage_keeps_as_many_microbatches_as_are_in_flight_however_many_there_are() -> None:
    for stage, (saved, sent, received) in enumerate(run_on(Grid(pp=4), peaks)):
        in_flight = 4 - stage
        assert [peak / saved[0] for peak in saved] == [min(m, in_flight) for m in COUNTS]
        assert max(sent) <= 1, "messages are kept after they have gone"
        assert max(received) <= in_flight + 1


"""Before it: one that is posted early."""


class Spread(nn.Module):
    """One number a sample to ``length`` numbers."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.weight = length, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).expand(len(x), self.length)


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True) * self.weight


def total(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def send(topology: Topology, length: int) -> list[float]:
    """A step under each schedule whose hidden tensor has ``length`` doubles."""
    found = []
    for schedule in ("gpipe", "1f1b"):
        units = [Spread(length), *[nn.Identity()] * (topology.pp.size - 2), Average()]
        options = {"schedule": schedule, "num_microbatches": 3, "partition": "uniform"}
        trial = Trial(lambda units=units: nn.Sequential(*units), [], total, options=options)
        engine = engine_of(topology, trial)
        x = torch.tensor([[1.0], [2.0], [6.0]], dtype=torch.float64)
        found += [engine.train_step(x, x).loss, engine.eval_step(x, x).loss]
    return found


@pytest.mark.report("NVIDIA/nccl#479")
@pytest.mark.report("pytorch/pytorch#172668")
@pytest.mark.parametrize(("pp", "length"), [(2, 8), (4, 8), (2, 2**23), (4, 2**20)])
def test_hidden_tensors_of_any_size_are_exchanged(pp: int, length: int) -> None:
    """The largest has 64 MiB, more than any buffer of a socket holds."""
    for losses in run_on(Grid(pp=pp), send, length=length):
        # Both weights fall from 1 by the mean of x, which is 3: the loss is then 4 times that.
        assert losses == pytest.approx([3.0, 12.0] * 2, rel=1e-12)
