"""Linear layers cut over an axis: by output features (column) or by input features (row)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ..comm.collectives import all_reduce, start_all_reduce
from ..placement import Placement, Replicate, Shard, cut
from ..rng import draw_rows, new_seed
from ..topology import Axis
from .regions import gather_from, split_to


def uniform_fan_in(rows: Tensor, fan_in: int) -> None:
    """How ``nn.Linear`` draws: U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    rows.uniform_(-bound, bound)


# Given a parameter and what makes its gradient: makes it at once, or keeps it and returns None.
Defer = Callable[[nn.Parameter, Callable[[], Tensor]], Tensor | None]


class _ColumnLinear(Function):
    """``x @ w.t() + b`` whose input gradient is summed over the axis behind the weight's matmul."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _ParallelLinear
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        pending = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            pending = start_all_reduce(grad @ weight, ctx.layer.axis, tag="input-grad")
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.layer.weight_grad(x, grad)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        grad_x = None if pending is None else pending.wait()
        return grad_x, grad_weight, grad_bias, None


class _RowLinear(Function):
    """``x @ w.t()`` summed over the axis; the sum replaces the product in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: _ParallelLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return all_reduce(F.linear(x, weight), layer.axis, tag="output")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = ctx.layer.weight_grad(x, grad) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


class _ParallelLinear(nn.Module):
    """What both cuts share: creation, initial values, conversion from ``nn.Linear``."""

    init_weight: Callable[[Tensor, int], object] = staticmethod(uniform_fan_in)
    defer: Defer | None = None
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, axis: Axis) -> None:
        super().__init__()
        self.in_features, self.out_features, self.axis = in_features, out_features, axis

    def _make(self, rows: int, cols: int, bias: int | None) -> None:
        self.weight = nn.Parameter(torch.empty(rows, cols))
        self.bias = None if bias is None else nn.Parameter(torch.empty(bias))
        self.reset_parameters()

    def placements(self) -> dict[str, Placement]:
        """How each own parameter lies on the axis."""
        raise NotImplementedError

    def weight_grad(self, x: Tensor, grad: Tensor) -> Tensor | None:
        """``grad.t() @ x`` over all rows, as ``nn.Linear`` has it: now, or when ``defer`` says."""
        x = x.detach()  # what waits keeps this tensor, not the graph that made it

        def make() -> Tensor:
            return grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

        return make() if self.defer is None else self.defer(self.weight, make)

    def _whole(self, x: Tensor) -> Tensor:
        """The layer on an axis of one rank."""
        if self.defer is None:
            return F.linear(x, self.weight, self.bias)
        return _ColumnLinear.apply(x, self.weight, self.bias, self)

    def reset_parameters(self) -> None:
        """Draw the parameters: cuts of one whole layer on ranks under one ``torch.manual_seed``.

        ``init_weight(rows, fan_in)`` fills blocks of rows of the whole weight; biases are
        U(-1/sqrt(fan_in), 1/sqrt(fan_in)), or zero where ``init_weight`` was replaced.
        """
        if self.weight.is_meta:
            return
        fan_in, placed = self.in_features, self.placements()
        seed, bias_seed = new_seed(), new_seed()
        init = self.init_weight
        draw_rows(self.weight, placed["weight"], self.axis, seed, lambda rows: init(rows, fan_in))
        if self.bias is not None:
            plain = init is uniform_fan_in
            fill = (lambda rows: uniform_fan_in(rows, fan_in)) if plain else Tensor.zero_
            draw_rows(self.bias, placed["bias"], self.axis, bias_seed, fill)

    def _load(self, linear: nn.Linear) -> Self:
        """Take the cut of a whole layer's values, dtype, device and ``requires_grad``."""
        for name, placement in self.placements().items():
            own, whole = getattr(self, name), getattr(linear, name)
            if own is not None:
                value = cut(whole.detach(), placement, self.axis).clone()
                setattr(self, name, nn.Parameter(value, whole.requires_grad))
        return self

    def extra_repr(self) -> str:
        """As ``nn.Linear``'s, with the axis."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, axis={self.axis.name}/{self.axis.size}"
        )


class ColumnParallelLinear(_ParallelLinear):
    """Linear with its output features cut over an axis of ``t`` ranks.

        x   [..., k]      whole
        w   [n / t, k]    each fused block's rows rank * n / t ... of the whole weight
        b   [n / t]       likewise
        y   [..., n / t]  cut; whole [..., n] with ``gather_output``

    Moves   forward nothing (``gather_output``: one all-gather, the elements of y); backward one
            all-reduce of x's gradient, the elements of x, behind the weight's gradient.
    Equals  ``nn.Linear`` on the whole weight, then the rank's slice of the last dim.

    Args:
        in_features: k.
        out_features: n, of the whole layer.
        bias: whether there is one.
        axis: the axis that cuts; of size 1 the layer is exactly ``nn.Linear``.
        gather_output: return the whole y on every rank.
        blocks: fused projections in one weight (3 for equal q/k/v, 2 for gate/up, a tuple of
            sizes for unequal ones): each is cut for itself, so a rank holds whole heads of each.
        sequence_parallel: not built yet; True is refused.

    Raises ValueError when a block does not divide by the axis, and under ``torch.autocast``.
    Source: Megatron-LM (arXiv 1909.08053), section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        axis: Axis,
        gather_output: bool = False,
        blocks: int | tuple[int, ...] = 1,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, axis)
        _refuse_sequence_parallel(sequence_parallel)
        self.gather_output = gather_output
        self.blocks = _block_sizes(out_features, blocks)
        for block in self.blocks:
            _check_divides(self, "output features", block, axis)
        rows = out_features // axis.size
        self._make(rows, in_features, rows if bias else None)

    def placements(self) -> dict[str, Placement]:
        """Weight and bias cut along dim 0, block by block."""
        return {"weight": Shard(0, self.blocks), "bias": Shard(0, self.blocks)}

    @classmethod
    def from_linear(
        cls,
        module: nn.Linear,
        *,
        axis: Axis,
        gather_output: bool = False,
        blocks: int | tuple[int, ...] = 1,
    ) -> ColumnParallelLinear:
        """The cut of an existing whole layer, on its device and in its dtype."""
        with torch.device("meta"):
            layer = cls(
                module.in_features,
                module.out_features,
                module.bias is not None,
                axis=axis,
                gather_output=gather_output,
                blocks=blocks,
            )
        return layer._load(module)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., k]`` to ``[..., n / t]``."""
        if self.axis.size == 1:
            return self._whole(x)
        _refuse_autocast(x)
        y = _ColumnLinear.apply(x, self.weight, self.bias, self)
        return self._gather(y) if self.gather_output else y

    def _gather(self, y: Tensor) -> Tensor:
        whole = gather_from(y, self.axis)
        if len(self.blocks) == 1:
            return whole
        # Rank by rank [q0 k0 v0 | q1 k1 v1] becomes block by block [q0 q1 | k0 k1 | v0 v1].
        sizes = [block // self.axis.size for block in self.blocks]
        ranks = [part.split(sizes, -1) for part in whole.chunk(self.axis.size, -1)]
        return torch.cat([part for block in zip(*ranks, strict=True) for part in block], -1)


class RowParallelLinear(_ParallelLinear):
    """Linear with its input features cut over an axis of ``t`` ranks.

        x   [..., k / t]  cut; whole [..., k] without ``input_is_parallel``
        w   [n, k / t]    columns rank * k / t ... of the whole weight
        b   [n]           whole, added once, after the sum
        y   [..., n]      whole

    Moves   forward one all-reduce, the elements of y; backward nothing (without
            ``input_is_parallel`` one all-gather of x's gradient).
    Equals  ``nn.Linear`` on the joined x.

    Args:
        in_features: k, of the whole layer.
        out_features: n.
        bias: whether there is one.
        axis: the axis that cuts; of size 1 the layer is exactly ``nn.Linear``.
        input_is_parallel: x is already this rank's slice (after a column-parallel layer).
        sequence_parallel: not built yet; True is refused.

    Raises ValueError when k does not divide by the axis, and under ``torch.autocast``.
    Source: Megatron-LM (arXiv 1909.08053), section 3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        axis: Axis,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, axis)
        _refuse_sequence_parallel(sequence_parallel)
        self.input_is_parallel = input_is_parallel
        _check_divides(self, "input features", in_features, axis)
        self._make(out_features, in_features // axis.size, out_features if bias else None)

    def placements(self) -> dict[str, Placement]:
        """Weight cut along dim 1; the bias is whole on every rank."""
        return {"weight": Shard(1, (self.in_features,)), "bias": Replicate()}

    @classmethod
    def from_linear(
        cls, module: nn.Linear, *, axis: Axis, input_is_parallel: bool = True
    ) -> RowParallelLinear:
        """The cut of an existing whole layer, on its device and in its dtype."""
        with torch.device("meta"):
            layer = cls(
                module.in_features,
                module.out_features,
                module.bias is not None,
                axis=axis,
                input_is_parallel=input_is_parallel,
            )
        return layer._load(module)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., k / t]`` to ``[..., n]``."""
        if self.axis.size == 1:
            return self._whole(x)
        _refuse_autocast(x)
        if not self.input_is_parallel:
            x = split_to(x, self.axis)
        y = _RowLinear.apply(x, self.weight, self)
        return y if self.bias is None else y + self.bias


def _block_sizes(features: int, blocks: int | tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(blocks, int):
        if blocks < 1 or features % blocks:
            raise ValueError(
                f"blocks = {blocks} does not divide out_features = {features}: "
                f"give a tuple of sizes for unequal blocks"
            )
        return (features // blocks,) * blocks
    if sum(blocks) != features:
        raise ValueError(
            f"blocks = {blocks} add up to {sum(blocks)}, not out_features = {features}"
        )
    return tuple(blocks)


def _check_divides(layer: nn.Module, what: str, features: int, axis: Axis) -> None:
    if features % axis.size:
        legal = [d for d in range(1, features + 1) if features % d == 0]
        near = sorted(legal, key=lambda d: abs(d - axis.size))[:3]
        raise ValueError(
            f"{type(layer).__name__}({layer.in_features}, {layer.out_features}) cuts {features} "
            f"{what} over {axis.name} = {axis.size}, which does not divide them: "
            f"use {axis.name} = {', '.join(map(str, sorted(near)))}"
        )


def _refuse_autocast(x: Tensor) -> None:
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            "a parallel layer does not follow torch.autocast: convert the layer and its input "
            "(layer.bfloat16()), and leave autocast off around it"
        )


def _refuse_sequence_parallel(wanted: bool) -> None:
    if wanted:
        raise ValueError("sequence_parallel=True is not built yet: use sequence_parallel=False")
