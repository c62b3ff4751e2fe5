"""The autograd doors of a tensor-parallel region (Megatron-LM, arXiv 1909.08053, section 3).

copy_to      forward: nothing      backward: all-reduce
reduce_from  forward: all-reduce   backward: nothing
split_to     forward: own slice    backward: all-gather
gather_from  forward: all-gather   backward: own slice
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..comm.collectives import all_gather, all_reduce
from ..topology import Axis


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A clone, because autograd may hand the same gradient to another branch.
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _SplitTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return x.chunk(axis.size, dim)[axis.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.axis, ctx.dim), None, None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.length = axis, dim, x.shape[dim]
        return all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        start = ctx.axis.rank * ctx.length
        return grad.narrow(ctx.dim, start, ctx.length), None, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Enter a region: every rank uses the whole ``x``, so its gradient is a sum over the ranks.

    Moves   forward nothing; backward one all-reduce, ``x.numel()`` elements.
    Equals  the identity.
    """
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Leave a region: the ranks' partial ``x`` are summed.

    Moves   forward one all-reduce, ``x.numel()`` elements; backward nothing.
    Equals  the identity of the sum.
    """
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def split_to(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Enter a region: each rank uses its own of the axis's equal slices of ``dim``.

    Moves   forward nothing; backward one all-gather, ``x.numel()`` elements in all.
    Equals  ``x.chunk(size, dim)[rank]``. ValueError when ``dim`` does not divide.
    """
    if x.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} does not divide into "
            f"{axis.name} = {axis.size} slices"
        )
    return x if axis.size == 1 else _SplitTo.apply(x, axis, dim)


def gather_from(x: Tensor, axis: Axis, dim: int = -1) -> Tensor:
    """Leave a region: the ranks' slices of ``dim`` are joined; used the same way on every rank.

    Moves   forward one all-gather, ``x.numel() * size`` elements in all; backward nothing.
    Equals  the identity of the joined tensor.
    """
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dim)
