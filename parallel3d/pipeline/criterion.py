"""The end of the last stage: the loss as a sum, scaled once, and the count of its items.

[Note: one division] A microbatch's loss is the sum over its items. It is multiplied by one over the
global number of items here and nowhere else; every reduction is a plain sum.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss, _WeightedLoss
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .segment import enter

IGNORED = -100
TRIALS = 4  # microbatches by which a loss is looked at, unless one tells
PER_SAMPLE = (nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
LossFn = Callable[[Any, Any], Tensor]


class SumLoss:
    """Computes each microbatch's loss, keeps it until its backward, and adds up the losses.

    Args:
        loss_fn: ``loss_fn(output, target)``, a scalar sum in fp32 or wider.
    """

    def __init__(self, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn
        self._trials = TRIALS
        self._kept: dict[int, tuple[Tensor, list[Any]]] = {}

    def begin(self, targets: list[Any], scale: Callable[[], Tensor] | None) -> None:
        """Start a step; ``scale()`` is one over the global number of items, None in evaluation."""
        self._kept.clear()
        self.targets, self.scale = targets, scale
        self.total: Tensor | None = None

    def forward(self, microbatch: int, output: Any) -> None:
        """Compute the loss of a microbatch; outputs narrower than fp32 are widened first."""
        leaves, spec = tree_flatten(output)
        with torch.set_grad_enabled(self.scale is not None):
            wide = tree_unflatten([_widen(enter(leaf)) for leaf in leaves], spec)
            loss = self.loss_fn(wide, self.targets[microbatch])
            _check(loss)
            if self.scale is not None:
                if self._trials:
                    known = adds_up(self.loss_fn, wide, self.targets[microbatch])
                    self._trials = 0 if known else self._trials - 1
                scaled = loss * self.scale().to(loss.dtype)
                self._kept[microbatch] = scaled, leaves
        value = loss.detach().double()
        self.total = value if self.total is None else self.total + value

    def backward(self, microbatch: int) -> list[Tensor]:
        """Gradients of the output's leaves that need one, in order."""
        loss, leaves = self._kept.pop(microbatch)
        if loss.requires_grad:
            loss.backward()
        gradients = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
                leaf.grad = None
        return gradients


def _widen(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.to(torch.promote_types(leaf.dtype, torch.float32))
    return leaf


def _check(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    elif loss.dtype not in (torch.float32, torch.float64):
        found = str(loss.dtype)
    else:
        return
    raise ValueError(
        f"loss_fn returned {found}: it must return a scalar tensor in float32 or float64, the SUM "
        f"over the items of the microbatch, for example nn.MSELoss(reduction='sum')"
    )


def adds_up(loss_fn: LossFn, output: Any, target: Any) -> bool:
    """Whether a sample taken twice has twice the loss; False also where this cannot be said.

    Raises ValueError where it has the same loss: that is a mean.
    """
    pair = output, target
    if not all(isinstance(each, Tensor) and each.dim() and len(each) for each in pair):
        return False
    devices = [output.device] if output.is_cuda else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            once = loss_fn(*(each[:1].detach().clone() for each in pair)).item()
            twice = loss_fn(*(torch.cat([each[:1].detach()] * 2) for each in pair)).item()
    except Exception:  # not a loss of any number of samples
        return False
    if not math.isfinite(once) or once == 0:
        return False
    if abs(twice / once - 1) < 1e-6:
        raise ValueError(
            f"loss_fn gave {once:.6g} for a sample and {twice:.6g} for the same sample twice, so "
            f"it is a mean: it must return the SUM over the items of the microbatch, which the "
            f"engine divides by the number of items in the whole batch"
        )
    return True


def as_sum(loss_fn: LossFn) -> LossFn:
    """The same loss as a sum: torch's own are switched, other means are a ValueError."""
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        name = next(name for name, _ in loss_fn.named_parameters())
        raise ValueError(f"loss_fn has a parameter, {name}: put it into the model's last unit")
    if isinstance(loss_fn, _Loss):
        if getattr(loss_fn, "reduction", "sum") == "sum":
            return loss_fn
        weighted = isinstance(loss_fn, _WeightedLoss) and loss_fn.weight is not None
        if loss_fn.reduction != "mean" or weighted:
            raise ValueError(
                f"{type(loss_fn).__name__}(reduction={loss_fn.reduction!r}) is not a sum over "
                f"items: use reduction='sum', with num_items= if it divides by something else"
            )
        loss_fn = copy.copy(loss_fn)
        loss_fn.reduction = "sum"
        return loss_fn
    reduction = _reduction(loss_fn)
    if reduction not in (None, "sum"):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise ValueError(
            f"{name} reduces by {reduction!r}: give it reduction='sum', for example by "
            f"functools.partial"
        )
    return loss_fn


def _reduction(loss_fn: LossFn) -> str | None:
    """How a loss says that it reduces, by its attribute or argument ``reduction``."""
    if hasattr(loss_fn, "reduction"):
        return str(loss_fn.reduction)
    try:
        parameter = inspect.signature(loss_fn).parameters.get("reduction")
    except (TypeError, ValueError):
        return None
    return str(parameter.default) if parameter and isinstance(parameter.default, str) else None


def default_num_items(loss_fn: LossFn) -> Callable[[Any], Tensor | int]:
    """Counts a target's items: integers that are not the loss's ``ignore_index``, or floats.

    For a loss of torch's that was switched from mean to sum, it counts what the mean divides by.
    """
    keywords = loss_fn.keywords if isinstance(loss_fn, partial) else {}
    ignored = keywords.get("ignore_index", getattr(loss_fn, "ignore_index", IGNORED))
    is_mean = isinstance(loss_fn, _Loss) and loss_fn.reduction == "mean"

    def num_items(target: Any) -> Tensor | int:
        leaves = tree_leaves(target)
        if len(leaves) != 1 or not isinstance(leaves[0], Tensor):
            raise ValueError(
                f"the target is a {type(target).__name__}, whose items cannot be counted: pass "
                f"num_items=fn(target) to the engine"
            )
        (leaf,) = leaves
        is_floating = leaf.is_floating_point() or leaf.is_complex()
        if is_mean and isinstance(loss_fn, PER_SAMPLE):
            return leaf.shape[:-1].numel()
        if is_mean and isinstance(loss_fn, nn.CrossEntropyLoss) and is_floating:
            classes = leaf.shape[min(1, leaf.dim() - 1)]
            return leaf.numel() // classes
        if is_floating:
            return leaf.numel()
        return (leaf != ignored).sum()

    return num_items
