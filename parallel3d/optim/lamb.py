"""LAMB: AdamW whose step on each parameter is as long as the parameter, times the rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.collectives import bytes_in_order
from .make import Options
from .whole import Shapes, Slice, Unbound, UpdateContext


class Lamb(Unbound):
    """LAMB (You et al., 2020, arXiv 1904.00962, algorithm 2), for ``Engine(optimizer=)``.

    Args:
        params: as of any torch optimizer.
        lr: of a step in units of the parameter's norm.
        betas: of the moving averages of the gradient and of its square.
        eps: added to the root of the second.
        weight_decay: times the parameter, is part of the update whose norm counts.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        params: torch.optim.optimizer.ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if min(lr, eps, weight_decay) < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"Lamb(lr={lr}, betas={tuple(betas)}, eps={eps}, weight_decay={weight_decay}): "
                f"none is negative, and betas are below 1"
            )
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)


class LambRule:
    """Norms of all parameters and of their updates are summed in one message over each axis."""

    name = "LAMB"

    def check(self, name: str, shape: tuple[int, ...], options: Options) -> None:
        """Any parameter will do."""

    def shapes(self, each: Slice, options: Options) -> Shapes:
        """Both moving averages."""
        return {"exp_avg": each.extent, "exp_avg_sq": each.extent}

    def sent(self, slices: Sequence[Slice], options: Sequence[Options]) -> int:
        """Two squared norms of each."""
        return bytes_in_order(2 * len(slices), torch.float64, slices[0].flat.axis)

    def update(self, slices: Sequence[Slice], step: UpdateContext) -> None:
        """``w -= lr * |w| / |u| * u``, with 1 for the ratio where a norm is 0."""
        flat = slices[0].flat
        sums = torch.zeros(2 * len(slices), dtype=torch.float64, device=flat.master.device)
        directions = {at: _direction(s, step) for at, s in enumerate(slices) if s.here}
        for at, direction in directions.items():
            part = slice(*slices[at].counted)
            sums[2 * at] = slices[at].values[part].norm().double().square()
            sums[2 * at + 1] = direction[part].norm().double().square()
        norms = step.total(sums, flat).sqrt().view(-1, 2)
        weight, length = norms[:, 0], norms[:, 1]
        ratios = torch.where((weight > 0) & (length > 0), weight / length, 1.0)
        for at, direction in directions.items():
            factor = -step.of(slices[at])["lr"] * ratios[at]
            slices[at].values.addcmul_(direction, factor.to(direction.dtype))


def _direction(each: Slice, step: UpdateContext) -> Tensor:
    """Adam's update and the decay, before any rate."""
    options, gradient = step.of(each), each.grads
    (beta1, beta2), number = options["betas"], step.number
    first, second = each.state["exp_avg"], each.state["exp_avg_sq"]
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = second.sqrt().div_(math.sqrt(1 - beta2**number)).add_(options["eps"])
    direction = torch.div(first, root.mul_(1 - beta1**number))
    return direction.add_(each.values, alpha=options["weight_decay"])
