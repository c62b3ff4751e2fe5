"""Bytes that a stage keeps, from the storages that live."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from parallel3d import Axis, ColumnParallelLinear
from parallel3d.pipeline.stage import Stage
from tests.live import Live
from tests.pipeline.units import WIDTH, Apply, Told, linear, stage_of

ROWS = 64
HIDDEN = ROWS * WIDTH * 4  # bytes of one activation


class OnItsContext(Function):
    """Keeps tensors where autograd does not see them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.more = x, x.exp()
        return x * ctx.more

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.more * (1 + ctx.x)


def parallel() -> nn.Module:
    return ColumnParallelLinear(WIDTH, WIDTH, axis=Axis.single())


def heavy(x: Tensor) -> Tensor:
    """Saves four activations."""
    return x.exp().sin().exp().sin()


UNITS: dict[str, Any] = {
    "layers": lambda: nn.Sequential(linear(), nn.GELU(), linear()),
    "a layer that defers": lambda: nn.Sequential(parallel(), nn.GELU(), parallel()),
    "many operations": lambda: Apply(heavy),
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.5), nn.GELU()),
    "attention": lambda: Apply(lambda x: F.scaled_dot_product_attention(*[x[None]] * 3)[0]),
    "its own checkpoint": lambda: Apply(lambda x: checkpoint(heavy, x, use_reentrant=False)),
    "tensors on a context": lambda: Apply(OnItsContext.apply),
}


def hidden() -> Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def made(unit: str, **options: Any) -> Stage:
    torch.manual_seed(0)
    stage = stage_of([UNITS[unit](), UNITS[unit]()], **options)
    for parameter in (p for each in stage.units for p in each.module.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    return stage


@pytest.mark.parametrize("unit", UNITS)
def test_a_repeated_stage_keeps_its_units_inputs_and_no_more(unit: str) -> None:
    stage = made(unit, recompute=True, split="defers" in unit)
    with Live() as live:
        for k in range(3):
            stage.forward(k, hidden(), seed=k)
            assert live.bytes() == 2 * HIDDEN * (k + 1), "of two units, each microbatch"


@pytest.mark.parametrize("unit", UNITS)
def test_a_first_run_of_what_will_be_repeated_needs_no_more_than_the_repeat(unit: str) -> None:
    stage = made(unit, recompute=True)
    with Live() as live:
        output = stage.forward(0, hidden(), seed=0)
        first, live.peak = live.peak, 0
        stage.backward(0, [torch.ones_like(output)])
        assert first <= live.peak


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("unit", UNITS)
def test_nothing_of_a_microbatch_is_left_after_its_backward(unit: str, recompute: bool) -> None:
    stage = made(unit, recompute=recompute)
    with Live() as live:
        gradients = [torch.ones_like(stage.forward(0, hidden(), seed=0))]
        (gradient,) = stage.backward(0, gradients)
        assert gradients == [] and live.bytes() == HIDDEN, "the input's gradient only"
        del gradient
        assert live.bytes() == 0


@pytest.mark.parametrize(("recompute", "expected"), [(False, [4, 3, 1]), (True, [3, 2, 1])])
def test_a_unit_is_let_go_before_the_one_before_it_begins(
    recompute: bool, expected: list[int]
) -> None:
    """After each backward: its input's gradient, and what the units before it keep."""
    kept: list[int] = []
    modules = [Apply(torch.exp), Apply(torch.exp), Apply(torch.exp)]
    with Live() as live:
        stage = stage_of(
            modules,
            recompute=recompute,
            weights=Told(lambda unit: kept.append(live.bytes() // HIDDEN)),
        )
        gradients = [torch.ones_like(stage.forward(0, hidden(), seed=0))]
        stage.backward(0, gradients)
    assert kept == expected, "exp saves what it gives, and that is the next one's input"


def test_what_waits_for_the_weights_are_inputs_and_output_gradients_of_the_layers() -> None:
    stage = made("a layer that defers", split=True)
    with Live() as live:
        for k in range(2):
            stage.forward(k, hidden(), seed=k)
        for k in range(2):
            gradients = stage.input_grad(k, [torch.ones(ROWS, WIDTH)])
            del gradients
        # Each unit: two layers; what the second takes is made by GELU, all else by a layer.
        assert live.bytes() == 2 * 2 * 4 * HIDDEN
        stage.weight_grad(0)
        assert live.bytes() == 2 * 4 * HIDDEN
        stage.weight_grad(1)
        assert live.bytes() == 0


def test_what_waits_does_not_keep_the_graph_before_its_layer() -> None:
    unit = nn.Sequential(Apply(OnItsContext.apply), parallel())
    for parameter in unit.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stage = stage_of([unit], split=True)
    with Live() as live:
        stage.forward(0, hidden(), seed=0)
        del stage.input_grad(0, [torch.ones(ROWS, WIDTH)])[:]
        assert live.bytes() == 2 * HIDDEN, "the layer's input and its output's gradient"
