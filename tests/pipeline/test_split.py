"""A backward in two actions: what waits for the second, and that together they are the one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Axis, ColumnParallelLinear, RowParallelLinear
from parallel3d.pipeline.stage import Stage, Unit


class Twice(nn.Module):
    """One weight with two uses in a unit, a norm, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = ColumnParallelLinear(6, 6, axis=Axis.single())
        self.down = RowParallelLinear(6, 6, axis=Axis.single())
        self.norm, self.plain = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.shared(self.shared(self.norm(x)).tanh())) + self.plain(x)


def stage(split: bool, recompute: bool = False) -> Stage:
    torch.manual_seed(0)
    units = [Unit(0, "0", Twice()), Unit(1, "1", nn.Linear(6, 6)), Unit(2, "2", Twice())]
    for unit in units:
        for parameter in unit.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return Stage(0, units, recompute=recompute, split=split)


def gradients(of: Stage) -> list[Tensor]:
    return [p.grad.clone() for unit in of.units for p in unit.module.parameters()]  # type: ignore[union-attr]


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 5, 6, generator=generator).requires_grad_() for _ in range(2)]


def forward(of: Stage, microbatch: int) -> list[Tensor]:
    return [torch.ones_like(of.forward(microbatch, inputs()[microbatch], seed=0))]


@pytest.mark.parametrize("recompute", [False, True])
def test_both_halves_are_the_whole_backward_bit_for_bit(recompute: bool) -> None:
    whole, halves = stage(False, recompute), stage(True, recompute)
    expected = [whole.backward(k, forward(whole, k)) for k in (0, 1)]
    found = [halves.input_grad(k, forward(halves, k)) for k in (0, 1)]
    for k in (0, 1):
        halves.weight_grad(k)
    for a, b in zip(found, expected, strict=True):
        assert all(map(torch.equal, a, b))
    assert all(map(torch.equal, gradients(halves), gradients(whole)))


def test_only_the_weights_of_parallel_layers_wait() -> None:
    halves = stage(True)
    halves.input_grad(0, forward(halves, 0))
    for unit in halves.units:
        for name, parameter in unit.module.named_parameters():
            waits = name in ("shared.weight", "down.weight")
            assert parameter.grad is not None
            assert (parameter.grad.abs().sum() == 0) == waits, name
    assert len(halves._deferred[0, 0]) == 3, "two uses of one weight, and one of the other"
    halves.weight_grad(0)
    assert not halves._deferred


def test_a_gradient_is_added_once_a_microbatch() -> None:
    halves, added = stage(True), []
    weight = halves.units[0].module.shared.weight
    halves.input_grad(0, forward(halves, 0))
    version = weight.grad._version
    halves.weight_grad(0)
    added.append(weight.grad._version - version)
    assert added == [1]


def test_units_are_announced_when_their_gradients_are_complete() -> None:
    halves, after = stage(True), []
    halves.after = after.append
    halves.input_grad(0, forward(halves, 0))
    assert after == []
    halves.weight_grad(0, last=True)
    assert after == [2, 1, 0]


def test_a_whole_backward_is_possible_in_a_stage_that_splits() -> None:
    whole, halves = stage(False), stage(True)
    whole.backward(0, forward(whole, 0))
    halves.backward(0, forward(halves, 0))
    assert all(map(torch.equal, gradients(halves), gradients(whole)))
