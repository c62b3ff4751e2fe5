"""A flat buffer: parameters of one unit in one piece of memory, and their gradients in another.

[Note: borders] Parameters, and the borders between the shards of the ``dp`` ranks, start at
multiples of 64 elements. Fused optimizer kernels treat the last few elements of a piece
differently, so other borders would change bits with the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    ``data`` [n] is in ``dtype``, ``grad`` [n] in fp32 or wider; n is a multiple of ``64 * dp``.
    ``owned`` is this rank's shard ``[lo, hi)``, ``updated`` what its optimizer updates: the shard,
    or everything if ``whole``. ``master`` has the values of that in the gradients' dtype, as they
    were before they were rounded to ``dtype``: the same memory as ``data`` where the dtypes are
    equal. Built with ``of=other``, it has gradients of its own and shares the parameters of
    ``other`` (a second use of tied parameters). A ``copy`` is updated here as another pipeline
    rank updates its own, which is the one that counts in the norm and in files.
    """

    def __init__(
        self,
        held: Sequence[Held],
        axis: Axis,
        device: torch.device,
        *,
        dtype: torch.dtype,
        whole: bool,
        of: Flat | None = None,
        copy: bool = False,
    ) -> None:
        self.axis, self.of, self.copy = axis, of, copy
        self.slots = _lay_out(held)
        length = _up(max(1, self.slots[-1].stop), ALIGNMENT * axis.size)
        shard = length // axis.size
        self.owned = (axis.rank * shard, (axis.rank + 1) * shard)
        self.updated = (0, length) if whole else self.owned
        wide = torch.promote_types(dtype, torch.float32)
        self.grad = torch.zeros(length, dtype=wide, device=device)
        self.data: Tensor
        self.master: Tensor
        self.data, self.master = (of.data, of.master) if of else self._values(dtype, device)
        self.coming: Callable[[], None] | None = None
        self._adopt()

    def move_master(self, to: Tensor) -> None:
        """Keep the masters in other memory from now on, apart from the values."""
        self.master = to.copy_(self.master)

    def arrive(self) -> bool:
        """Wait for an update that is made on the host, if one is under way; whether it was.

        What it read may then be written, and the values that it made may be read.
        """
        if self.coming is None:
            return False
        self.coming()
        self.coming = None
        return True

    def _values(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The parameters' values in ``dtype``, and wide ones of what is updated."""
        values = torch.zeros_like(self.grad, device=device)
        for held, start, stop in self.slots:
            values[start:stop].view(held.parameter.shape).copy_(held.parameter.detach())
        part = values[slice(*self.updated)]
        shared = dtype == values.dtype or len(part) == len(values)
        return values.to(dtype), part if shared else part.clone()

    def _adopt(self) -> None:
        """Make each parameter a view of the buffers."""
        self._addresses = []
        for held, start, stop in self.slots:
            parameter = held.parameter
            parameter.data = self.data[start:stop].view(parameter.shape)
            if self.grad.dtype != self.data.dtype:
                parameter.grad_dtype = self.grad.dtype
            parameter.grad = self.grad[start:stop].view(parameter.shape)
            self._addresses.append((parameter.data_ptr(), parameter.grad.data_ptr()))

    @property
    def owned_grad(self) -> Tensor:
        """Gradients of the owned shard: reduced, once the reduction is over."""
        return self.grad[slice(*self.owned)]

    @property
    def updated_grad(self) -> Tensor:
        """Gradients of what the optimizer updates: the owned shard, or everything at stage 0."""
        return self.grad[slice(*self.updated)]

    def parts(self, low: int, high: int) -> list[Slot]:
        """Each parameter's part in ``[low, high)`` of the buffer, without those that have none."""
        return [
            Slot(held, max(start, low), min(stop, high))
            for held, start, stop in self.slots
            if max(start, low) < min(stop, high)
        ]

    def check(self) -> None:
        """Raise RuntimeError if a parameter or gradient has left its place, or was frozen."""
        for (held, _, _), (data, grad) in zip(self.slots, self._addresses, strict=True):
            parameter = held.parameter
            if parameter.grad is None or parameter.grad.data_ptr() != grad:
                raise RuntimeError(
                    f"the gradient of {held.name} was replaced or set to None: gradients belong to "
                    f"the engine, so do not call zero_grad() or assign .grad"
                )
            if parameter.data_ptr() != data:
                raise RuntimeError(
                    f"the memory of {held.name} was replaced: parameters are views of the engine's "
                    f"buffers, so write into them in place, and do not move the model"
                )
            if not parameter.requires_grad:
                raise RuntimeError(
                    f"{held.name} was frozen after the engine was built, which reads requires_grad "
                    f"once: build another engine and load a checkpoint"
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
