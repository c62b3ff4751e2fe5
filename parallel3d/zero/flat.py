"""A flat buffer: parameters of one unit in one piece of memory, and their gradients in another.

[Note: borders] Parameters, and the borders between the shards of the ``dp`` ranks, start at
multiples of 64 elements. Fused optimizer kernels treat the last few elements of a piece
differently, so other borders would change bits with the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..placement import Placement
from ..topology import Axis

ALIGNMENT = 64


@dataclass
class Held:
    """A parameter that a rank holds part of.

    Args:
        name: in the whole model.
        parameter: the local tensor, cut over ``tp``.
        placement: how it lies on ``tp``.
        index: of the parameter in the whole model.
        group: index of its optimizer group in the whole model.
    """

    name: str
    parameter: nn.Parameter
    placement: Placement
    index: int
    group: int


class Slot(NamedTuple):
    """Where a parameter lies in its flat buffer, in elements."""

    held: Held
    start: int
    stop: int


class Flat:
    """The parameters of one unit that share dtypes, as views of one buffer; gradients likewise.

    ``data`` and ``grad`` are [n], n a multiple of ``64 * dp``; gradients are fp32 or wider.
    ``owned`` is this rank's shard ``[lo, hi)``. ``master`` holds the values that the optimizer
    updates, in the gradients' dtype: the same memory as ``data`` where the dtypes are equal.
    Built with ``of=other``, it has gradients of its own and shares the parameters of ``other``
    (a second use of tied parameters).
    """

    def __init__(
        self,
        held: Sequence[Held],
        axis: Axis,
        device: torch.device,
        *,
        whole: bool,
        of: Flat | None = None,
    ) -> None:
        self.axis, self.of = axis, of
        self.slots = _lay_out(held)
        length = _up(self.slots[-1].stop if self.slots else 0, ALIGNMENT * axis.size)
        self.shard = length // axis.size
        self.owned = (axis.rank * self.shard, (axis.rank + 1) * self.shard)
        dtype = held[0].parameter.dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.data: Tensor = of.data if of else torch.zeros(length, dtype=dtype, device=device)
        self.grad = torch.zeros(length, dtype=wide, device=device)
        self._adopt()
        self.updated = (0, length) if whole else self.owned
        part = self.data[slice(*self.updated)]
        self.master = part if dtype == wide else part.to(wide)

    def _adopt(self) -> None:
        """Make each parameter a view of the buffers, keeping its value."""
        self._addresses = []
        for held, start, stop in self.slots:
            parameter = held.parameter
            view = self.data[start:stop].view(parameter.shape)
            if self.of is None:
                view.copy_(parameter.detach())
            parameter.data = view
            if self.grad.dtype != self.data.dtype:
                parameter.grad_dtype = self.grad.dtype
            parameter.grad = self.grad[start:stop].view(parameter.shape)
            self._addresses.append(parameter.grad.data_ptr())

    @property
    def owned_grad(self) -> Tensor:
        """Gradients of the owned shard: reduced, once the reduction is over."""
        return self.grad[slice(*self.owned)]

    @property
    def updated_grad(self) -> Tensor:
        """Gradients of what the optimizer updates: the owned shard, or everything at stage 0."""
        return self.grad[slice(*self.updated)]

    def owned_parts(self) -> list[tuple[Held, int, int]]:
        """``(held, start, stop)`` in the buffer, of each parameter's part in the owned shard."""
        return self.parts(*self.owned)

    def parts(self, low: int, high: int) -> list[tuple[Held, int, int]]:
        """Each parameter's part in ``[low, high)``, without those that have none."""
        return [
            (held, max(start, low), min(stop, high))
            for held, start, stop in self.slots
            if max(start, low) < min(stop, high)
        ]

    def check(self) -> None:
        """Raise RuntimeError if a gradient has left its place (somebody replaced ``.grad``)."""
        for (held, _, _), address in zip(self.slots, self._addresses, strict=True):
            grad = held.parameter.grad
            if grad is None or grad.data_ptr() != address:
                raise RuntimeError(
                    f"the gradient of {held.name} was replaced or set to None: gradients belong to "
                    f"the engine, so do not call zero_grad() or assign .grad"
                )


def _lay_out(held: Sequence[Held]) -> list[Slot]:
    """Parameters one after another, ordered by optimizer group, each at a multiple of 64."""
    slots, start = [], 0
    for item in sorted(held, key=lambda item: (item.group, item.index)):
        stop = start + item.parameter.numel()
        slots.append(Slot(item, start, stop))
        start = _up(stop, ALIGNMENT)
    return slots


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
