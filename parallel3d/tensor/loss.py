"""Cross entropy over a vocabulary that is cut over an axis; the whole logits exist nowhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ..comm.collectives import all_reduce
from ..topology import Axis


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: Tensor, axis: Axis) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        peak = all_reduce(logits.amax(-1), axis, op="max", tag="loss")
        local = target - axis.rank * logits.shape[-1]
        elsewhere = (local < 0) | (local >= logits.shape[-1]) | ignored
        local = local.masked_fill(elsewhere, 0)
        shifted = logits - peak.unsqueeze(-1)
        chosen = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        weights = shifted.exp_()
        # One all-reduce for both sums: the exponentials' and the target's logit.
        sums = all_reduce(torch.stack((weights.sum(-1), chosen)), axis, tag="loss")
        weights.div_(sums[0].unsqueeze(-1))
        ctx.save_for_backward(weights, local, elsewhere, ignored)
        return (sums[0].log() - sums[1]).masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probability, local, elsewhere, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0.0).unsqueeze(-1)
        out = probability * grad
        here = (~elsewhere).unsqueeze(-1).to(out.dtype)
        out.scatter_add_(-1, local.unsqueeze(-1), -here * grad)
        return out, None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    axis: Axis,
    ignore_index: int = -100,
    reduction: str = "sum",
) -> Tensor:
    """Cross entropy of logits cut over the vocabulary, in fp32 or wider.

        logits [..., V / t]   cut; equal lengths, padding columns are -inf
        target [...]          whole, int64: 0 <= target < V, or ``ignore_index``
        out    []             the sum; ``mean`` over counted targets, or ``none`` [...]

    Moves   forward two all-reduces, of 1 and 2 elements per target; backward nothing.
    Equals  ``F.cross_entropy`` on the joined logits in fp32 or wider.

    Raises IndexError, on every rank, for a target outside the vocabulary (on CUDA a device
    assertion; there a target in the padding has an infinite loss). ValueError for an unknown
    ``reduction`` or a target of another shape. Source: Megatron-LM (arXiv 1909.08053), section 3.
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction = {reduction!r} is not one of sum, mean, none")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target of shape {tuple(target.shape)} does not fit logits of shape "
            f"{tuple(logits.shape)}: it must be {tuple(logits.shape[:-1])}"
        )
    if axis.size == 1:
        flat = logits.reshape(-1, logits.shape[-1])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        losses = F.cross_entropy(
            flat, target.reshape(-1), ignore_index=ignore_index, reduction=reduction
        )
        return losses.view(target.shape) if reduction == "none" else losses
    ignored = target == ignore_index
    _check(target, ignored, logits.shape[-1] * axis.size)
    losses = _VocabParallelCrossEntropy.apply(logits, target, ignored, axis)
    if losses.device.type == "cpu" and torch.isposinf(losses).any():
        _refuse_padding(logits, target, losses, axis)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / (~ignored).sum() if reduction == "mean" else total


def _check(target: Tensor, ignored: Tensor, size: int) -> None:
    wrong = ~ignored & ((target < 0) | (target >= size))
    if target.device.type != "cpu":
        torch._assert_async(~wrong.any())
    elif wrong.any():
        raise IndexError(f"Target {target[wrong][0].item()} is out of bounds.")


def _refuse_padding(logits: Tensor, target: Tensor, losses: Tensor, axis: Axis) -> None:
    """Raise on every rank when a target lies in the padding, whose logits are -inf.

    The infinite loss, which led here, is everyone's. A vocabulary's own logit may be -inf too, but
    padding is so in every row, up to the last column.
    """
    finite = (logits.detach() != -torch.inf).flatten(0, -2).any(0)
    used = torch.where(finite, torch.arange(1, len(finite) + 1), 0).amax()
    ends = torch.where(used > 0, axis.rank * len(finite) + used, 0)
    size = int(all_reduce(ends, axis, op="max", tag="loss"))
    wrong = target[torch.isposinf(losses) & (target >= size)]
    if len(wrong):
        raise IndexError(f"Target {wrong[0].item()} is out of bounds.")
