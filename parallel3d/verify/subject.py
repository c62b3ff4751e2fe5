"""What is proved: a model and its plain twin, a loss and batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..topology import Topology

LossFn = Callable[[Any, Any], Tensor]
Batch = tuple[Any, Any] | list[tuple[Any, Any]]
IGNORED = -100


def count_items(target: Any) -> int:
    """Items of a target: integers other than -100, or all floats."""
    (leaf,) = tree_leaves(target)
    return leaf.numel() if leaf.is_floating_point() else int((leaf != IGNORED).sum())


@dataclass(frozen=True)
class Subject:
    """Functions that can be pickled, so at the top of a module or ``functools.partial`` of such.

    Args:
        build: ``build(topology)`` gives the model, an ``nn.Sequential`` of units, on any device.
        reference: gives its twin in plain ``torch.nn``, with the same names in its state dict and
            the same whole shapes.
        loss: ``loss(output, target)`` of whole outputs: the sum over a batch's items.
        batch: ``batch(step)`` gives the whole batch ``(x, target)``, pytrees of tensors that are
            cut along dim 0; the same whenever it is called. Or a list ``[(x, target), ...]`` of
            ready microbatches, whose sizes may differ; each dp rank gets as many of them.
        cut_loss: ``cut_loss(topology)`` gives the loss for outputs that the model leaves cut over
            ``tp``; by default it is ``loss``.
        num_items: counts a target's items.
    """

    build: Callable[[Topology], nn.Sequential]
    reference: Callable[[], nn.Module]
    loss: LossFn
    batch: Callable[[int], Batch]
    cut_loss: Callable[[Topology], LossFn] | None = None
    num_items: Callable[[Any], Any] = count_items

    def loss_under(self, topology: Topology) -> LossFn:
        """The loss of the model's outputs under a topology."""
        return self.cut_loss(topology) if self.cut_loss else self.loss
