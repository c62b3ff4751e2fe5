"""A parallel layer and its whole counterpart, side by side."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.placement import Replicate, Shard, cut
from parallel3d.topology import Axis

TOLERANCE = 1e-12


def error(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest of ``b``; absolute where that is zero."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{a.shape} {a.dtype} != {b.shape} {b.dtype}"
    if not b.numel():
        return 0.0
    return float((a - b).abs().max() / (b.abs().max() or 1.0))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Cut(NamedTuple):
    """Which blocks of the last dim of an input or output are cut; () is whole."""

    blocks: tuple[int, ...] = ()

    def of(self, whole: Tensor, axis: Axis) -> Tensor:
        placement = Shard(whole.ndim - 1, self.blocks) if self.blocks else Replicate()
        return cut(whole, placement, axis)


def compare(
    layer: nn.Module, whole: nn.Module, x: Tensor, axis: Axis, x_cut: Cut, y_cut: Cut
) -> dict[str, float]:
    """Errors of the output, of the input's gradient and of every parameter's."""
    x_whole = x.detach().requires_grad_(x.is_floating_point())
    x_local = x_cut.of(x.detach(), axis).detach().requires_grad_(x.is_floating_point())
    y_whole, y_local = whole(x_whole), layer(x_local)
    weights = drawn(*y_whole.shape, seed=7)
    (y_whole * weights).sum().backward()
    (y_local * y_cut.of(weights, axis)).sum().backward()
    errors = {"output": error(y_local.detach(), y_cut.of(y_whole.detach(), axis))}
    if x.is_floating_point():
        assert x_local.grad is not None and x_whole.grad is not None
        errors["input's gradient"] = error(x_local.grad, x_cut.of(x_whole.grad, axis))
    parameters = dict(layer.named_parameters())
    assert list(parameters) == [name for name, _ in whole.named_parameters()]
    for name, placement in layer.placements().items():
        if name in parameters:
            own, grad = parameters[name], whole.get_parameter(name).grad
            assert own.grad is not None and grad is not None
            errors[f"{name}'s gradient"] = error(own.grad, cut(grad, placement, axis))
    return errors
