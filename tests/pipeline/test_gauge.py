"""What a unit is said to cost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallel3d import ColumnParallelLinear
from parallel3d.comm.host import host_axis
from parallel3d.pipeline.activations import Activations
from parallel3d.pipeline.costs import UnitCosts
from parallel3d.pipeline.criterion import SumLoss
from parallel3d.pipeline.gauge import Gauged, flops, gauge, seconds
from parallel3d.pipeline.offload import Host
from parallel3d.pipeline.stage import Unit
from parallel3d.topology import Axis
from tests.pipeline.units import keeping

ROWS, WIDTH, WIDE = 3, 8, 16
PRODUCT = 2 * ROWS * WIDTH * WIDE  # FLOPs of [3, 8] x [8, 16]
SQUARED = nn.MSELoss(reduction="sum")


def gauged(
    module: nn.Module, x: Tensor, recompute: bool | str | Activations = False, loss: bool = False
) -> Gauged:
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    end = SumLoss(SQUARED) if loss else None
    if end is not None:
        end.begin([torch.zeros(ROWS, WIDE)], lambda: torch.ones(()))
    with flops() as read:
        return gauge(Unit(0, "0", module), x, read, activations=keeping(recompute), end=end)


def activation() -> Tensor:
    return torch.randn(ROWS, WIDTH).requires_grad_()


def test_a_parallel_layer_defers_its_weight_gradient() -> None:
    layer = ColumnParallelLinear(WIDTH, WIDE, axis=Axis.single())
    costs = gauged(layer, activation()).costs
    assert costs[:3] == (PRODUCT, PRODUCT, PRODUCT)
    assert costs.saved == ROWS * WIDTH * 4, "its input"
    assert costs.deferred == ROWS * (WIDTH + WIDE) * 4, "its input and its output's gradient"
    assert costs.output == ROWS * WIDE * 4


def test_a_layer_that_is_called_by_keyword_costs_the_same() -> None:
    class ByKeyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = ColumnParallelLinear(WIDTH, WIDE, axis=Axis.single())

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x=x)

    costs = gauged(ByKeyword(), activation()).costs
    assert costs == gauged(ByKeyword().layer, activation()).costs


def test_a_plain_layer_does_all_in_its_input_gradient() -> None:
    costs = gauged(nn.Linear(WIDTH, WIDE), activation()).costs
    assert costs == UnitCosts(
        PRODUCT, 2 * PRODUCT, 0, saved=ROWS * WIDTH * 4, output=ROWS * WIDE * 4
    )


def test_what_needs_no_gradient_costs_none() -> None:
    frozen = ColumnParallelLinear(WIDTH, WIDE, axis=Axis.single()).requires_grad_(False)
    assert gauged(frozen, activation()).costs[:3] == (PRODUCT, PRODUCT, 0)
    assert gauged(frozen, torch.randn(ROWS, WIDTH)).costs[:3] == (PRODUCT, 0, 0)
    assert gauged(frozen, activation()).costs.deferred == 0


def test_recompute_keeps_the_input_and_runs_the_forward_twice() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))
    kept, again = (gauged(module, activation(), recompute=on).costs for on in (False, True))
    assert again.saved == ROWS * WIDTH * 4 < kept.saved
    assert again.input_grad == kept.input_grad + kept.forward


def test_selective_recompute_keeps_products_and_repeats_none() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))
    kept, again = (gauged(module, activation(), mode).costs for mode in ("none", "selective"))
    assert again.saved == ROWS * (WIDTH + WIDE + WIDTH) * 4
    assert again.input_grad == kept.input_grad


def test_of_what_is_offloaded_only_what_stays_is_kept() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))
    host = Host(torch.device("cpu"), host_axis(0))
    small = gauged(module, activation(), Activations(host=host)).costs
    assert small.saved == gauged(module, activation()).costs.saved == ROWS * (WIDTH + 2 * WIDE) * 4
    host.least = ROWS * WIDE * 4
    assert gauged(module, activation(), Activations(host=host)).costs.saved == ROWS * WIDTH * 4
    for mode in ("full", "selective"):
        host.least = 1
        assert gauged(module, activation(), Activations(mode, host=host)).costs.saved == 0


def test_the_last_unit_bears_the_loss_and_hands_nothing_on() -> None:
    layer = nn.Linear(WIDTH, WIDE)
    inner, last = (gauged(layer, activation(), loss=loss).costs for loss in (False, True))
    assert last.output == 0
    assert last.saved >= inner.saved + ROWS * WIDE * 4, "and keeps its output for the loss"
    assert last[:3] == inner[:3]


def test_attention_counts_on_every_device() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.view(1, 1, ROWS, WIDTH)
            attend = nn.functional.scaled_dot_product_attention
            return attend(heads, heads, heads).view(ROWS, WIDTH)

    costs = gauged(Attention(), activation()).costs
    product = 2 * ROWS * ROWS * WIDTH
    assert costs.forward == 2 * product
    assert costs.input_grad >= 4 * product


@pytest.mark.parametrize("times", [1, 3])
def test_a_gradient_is_added_once_a_run_and_the_input_keeps_none(times: int) -> None:
    x = activation()
    for _ in range(times):
        gauged(nn.Linear(WIDTH, WIDE), x)
    assert x.grad is None


def test_time_is_told_in_seconds() -> None:
    with seconds(torch.device("cpu")) as read:
        module = nn.Linear(WIDTH, WIDE).requires_grad_(False)
        costs = gauge(
            Unit(0, "0", module), activation(), read, activations=Activations(), end=None
        ).costs
    assert 0 < costs.forward < 60
    assert costs.weight_grad >= 0


def test_where_the_backward_is_whole_nothing_is_deferred() -> None:
    layer = ColumnParallelLinear(WIDTH, WIDE, axis=Axis.single())
    layer.weight.grad, layer.bias.grad = torch.zeros(WIDE, WIDTH), torch.zeros(WIDE)
    unit = Unit(0, "0", layer)
    with flops() as read:
        costs = gauge(
            unit, activation(), read, activations=Activations(), end=None, split=False
        ).costs
    assert costs[:3] == (PRODUCT, 2 * PRODUCT, 0)
    assert costs.deferred == 0


def test_a_unit_that_will_be_compiled_is_timed_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    seen = []
    monkeypatch.setattr(module, "compile", lambda: seen.append(module))
    with seconds(torch.device("cpu")) as read:
        for compiled in (False, True):
            unit = Unit(0, "0", module)
            gauge(unit, activation(), read, activations=Activations(), end=None, compiled=compiled)
    assert seen == [module]
