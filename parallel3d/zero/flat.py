"""A flat buffer: parameters of one unit in one piece of memory, and their gradients in another.

[Note: borders] Parameters, and the borders between the shards of the ranks, start at multiples of
64 elements. Fused optimizer kernels treat the last few elements of a piece differently, so other
borders would change bits with the layout.

[Note: gathered values] Where a rank keeps its shard only, the memory of the whole is freed and
filled again, but stays one storage: what autograd has saved of a parameter may be a view of it.
Meanwhile the parameter is one NaN, expanded to its shape. Reading it gives NaN and no crash, and
what is written to it, or to values that will be thrown away, is found by its version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm.collectives import Pending, start_all_gather
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

    Args:
        held: the parameters.
        axis: the ranks that share them out.
        device: where they lie.
        dtype: of the values; gradients are in fp32 or wider.
        stage: of ZeRO: what of this is kept, see below.
        replicas: how many such axes hold the same.
        trained: or else frozen, without gradients.
        of: the flat whose parameters this one shares, with gradients of its own: this is a second
            use of tied parameters.
        copy: it is updated here as another pipeline rank updates its own, which is the one that
            counts in the norm and in files.

    ``data`` [n] has the values, n a multiple of ``64 * axis.size``; ``owned`` is this rank's shard
    ``[lo, hi)``, ``shard`` [n / d] its values and ``owned_grad`` [n / d] its reduced gradient.
    ``updated`` is what the optimizer here updates: the shard, or at stage 0 everything. ``master``
    has the values of that in the gradients' dtype, as they were before they were rounded to
    ``dtype``: the same memory as the values where the dtypes are equal.

    ``grad`` [n] is kept at stages 0 and 1, and ``owned_grad`` a slice of it; from stage 2 on it is
    lent for a backward and taken back. At stage 3 ``data`` has memory from ``gather`` to
    ``release`` only, and parameters have values from ``show`` to ``hide``.

    Masters may live away from the device: then ``away`` copies them to the values, and while an
    update is being made there ``coming`` waits until it has done so. So may the shards of stage 3:
    then ``bring`` copies them to their place in ``data`` and gathers from there.
    """

    def __init__(
        self,
        held: Sequence[Held],
        axis: Axis,
        device: torch.device,
        *,
        dtype: torch.dtype,
        stage: int,
        replicas: int = 1,
        trained: bool = True,
        of: Flat | None = None,
        copy: bool = False,
    ) -> None:
        self.axis, self.of, self.copy, self.stage = axis, of, copy, stage
        self.slots = _lay_out(held)
        length = _up(max(1, self.slots[-1].stop), ALIGNMENT * axis.size * replicas)
        shard = length // axis.size
        self.length = length
        self.owned = (axis.rank * shard, (axis.rank + 1) * shard)
        self.updated = (0, length) if stage == 0 else self.owned
        self.wide = torch.promote_types(dtype, torch.float32) if trained else dtype
        self.users: list[Flat] = [self]
        self.data: Tensor
        self.shard: Tensor
        self.master: Tensor
        if of is None:
            self.data, self.shard, self.master = self._values(dtype, device)
        else:
            self.data, self.shard, self.master = of.data, of.shard, of.master
            of.users.append(self)
        self.away: Callable[[], None] | None = None
        self.bring: Callable[[str], Pending] | None = None
        self.coming: Callable[[], None] | None = None
        self.grad: Tensor | None = None
        self._blank: Tensor | None = None
        self._versions: list[int] = []
        if stage == 3:
            self._hide()
            self._free()
        else:
            self._show()
        if trained:
            self._make_gradients(device)

    def _values(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The values in ``dtype``, the owned ones, and wide ones of what is updated."""
        values = torch.zeros(self.length, dtype=self.wide, device=device)
        for held, start, stop in self.slots:
            values[start:stop].view(held.parameter.shape).copy_(held.parameter.detach())
        data = values.to(dtype)
        shard = data[slice(*self.owned)]
        if self.stage == 3:
            shard = shard.clone()
        part = values[slice(*self.updated)]
        if dtype == self.wide:
            return data, shard, shard if self.stage == 3 else part
        return data, shard, part if self.stage == 0 else part.clone()

    def _make_gradients(self, device: torch.device) -> None:
        for held, _, _ in self.slots:
            if self.wide != self.data.dtype:
                held.parameter.grad_dtype = self.wide
        low, high = self.owned
        if self.stage < 2:
            self.lend(torch.zeros(self.length, dtype=self.wide, device=device))
            assert self.grad is not None
            self.owned_grad = self.grad[low:high]
            return
        for held, _, _ in self.slots:
            held.parameter.grad = None
        self.owned_grad = torch.zeros(high - low, dtype=self.wide, device=device)

    @property
    def home(self) -> Flat:
        """The flat that has the values."""
        return self.of or self

    @property
    def updated_grad(self) -> Tensor:
        """Gradients of what the optimizer updates: the owned shard, or everything at stage 0."""
        if self.stage > 0:
            return self.owned_grad
        assert self.grad is not None
        return self.grad

    @property
    def updated_values(self) -> Tensor:
        """The values of what the optimizer updates, where a gather takes them."""
        return self.shard if self.stage == 3 else self.data[slice(*self.updated)]

    def move_master(self, to: Tensor, away: Callable[[], None]) -> None:
        """Keep the masters in other memory from now on, from which ``away`` copies them."""
        to.copy_(self.master)
        self.away = away
        for flat in self.users:
            flat.master = to

    def move_shard(
        self, to: Tensor, *, bring: Callable[[str], Pending], away: Callable[[], None]
    ) -> None:
        """Keep the owned values in other memory, from which ``bring`` gathers them into ``data``.

        Frozen ones are their own masters. Others stay where they are: ``away`` brings those on the
        device to the values.
        """
        to.copy_(self.shard)
        frozen = not self.slots[0].held.parameter.requires_grad
        if self.away is None:
            self.away = None if frozen else away
        for flat in self.users:
            flat.shard, flat.master = to, to if frozen else flat.master
        self.bring = bring

    def publish(self) -> bool:
        """Bring the masters to the values; False where a coming update will do so itself."""
        if self.coming is not None:
            return False
        values = self.updated_values
        if self.away is not None:
            self.away()
        elif values.data_ptr() != self.master.data_ptr():
            values.copy_(self.master)
        return True

    def arrive(self) -> bool:
        """Wait for an update that is under way elsewhere, with gradients zero; whether one was."""
        if self.coming is None:
            return False
        self.coming()
        self.coming = None
        self.zero_gradient()
        return True

    def zero_gradient(self) -> None:
        """Set what is kept of the gradient to zero, unless an update reads it: then later."""
        if self.coming is None:
            (self.owned_grad if self.grad is None else self.grad).zero_()

    def parts(self, low: int, high: int) -> list[Slot]:
        """Each parameter's part in ``[low, high)`` of the buffer, without those that have none."""
        return [
            Slot(held, max(start, low), min(stop, high))
            for held, start, stop in self.slots
            if max(start, low) < min(stop, high)
        ]

    def lend(self, buffer: Tensor) -> None:
        """Let the parameters gather their gradients in ``buffer`` [n]."""
        self.grad = buffer
        for held, start, stop in self.slots:
            held.parameter.grad = buffer[start:stop].view(held.parameter.shape)

    def take_back(self) -> None:
        """Leave the parameters without gradients."""
        self.grad = None
        for held, _, _ in self.slots:
            held.parameter.grad = None

    def gather(self, tag: str) -> Pending:
        """Give ``data`` memory, and start to fill it from everyone's ``shard``."""
        self._resize(self.nbytes)
        if self.bring is not None:
            return self.bring(tag)
        return start_all_gather(self.shard, self.data, self.axis, tag=tag)

    def release(self) -> None:
        """Free the memory of ``data``, into which no gather may be under way."""
        self.hide()
        self._free()

    def show(self) -> None:
        """Let the parameters of all uses be the values that were gathered."""
        for flat in self.users:
            flat._check_untouched()
            flat._show()

    def hide(self) -> None:
        """Let the parameters of all uses be NaN."""
        for flat in self.users:
            flat._check_untouched()
            flat._hide()

    def accept(self) -> None:
        """Take what was written to parameters of all uses as meant."""
        for flat in self.users:
            flat._note_versions()

    @property
    def nbytes(self) -> int:
        """Of ``data`` while it has memory."""
        return self.length * self.data.element_size()

    def _free(self) -> None:
        # What was given to numpy cannot be resized: it keeps its memory.
        if self.data.untyped_storage().resizable():
            self._resize(0)

    def _resize(self, nbytes: int) -> None:
        storage = self.data.untyped_storage()
        if storage.nbytes() != nbytes:
            storage.resize_(nbytes)

    def _show(self) -> None:
        for held, start, stop in self.slots:
            held.parameter.data = self.data[start:stop].view(held.parameter.shape)
        self._blank = None
        self._note_versions()

    def _hide(self) -> None:
        if self._blank is not None:
            return
        dtype = self.data.dtype
        nothing = math.nan if dtype.is_floating_point or dtype.is_complex else 0
        self._blank = torch.full((), nothing, dtype=dtype, device=self.data.device)
        for held, _, _ in self.slots:
            held.parameter.data = self._blank.expand(held.parameter.shape)
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [held.parameter._version for held, _, _ in self.slots]

    def _check_untouched(self) -> None:
        for (held, start, _), version in zip(self.slots, self._versions, strict=True):
            if held.parameter._version != version or not self._is_placed(held, start):
                self._note_versions()
                raise RuntimeError(
                    f"{held.name} was written to or replaced, but at zero.stage = 3 a rank keeps "
                    f"its shard of it only, and the change would be lost: write inside of "
                    f"engine.parts.shards.edit(), or load a checkpoint"
                )

    def check(self) -> None:
        """Raise RuntimeError if a parameter or gradient has left its place, or was frozen."""
        for held, start, _ in self.slots:
            parameter = held.parameter
            if not _lies_at(parameter.grad, self.grad, start):
                raise RuntimeError(
                    f"the gradient of {held.name} was replaced or set to None: gradients belong to "
                    f"the engine, so do not call zero_grad() or assign .grad"
                )
            if not self._is_placed(held, start):
                raise RuntimeError(
                    f"the memory of {held.name} was replaced: parameters are views of the engine's "
                    f"buffers, so write into them in place, and do not move the model"
                )
            if not parameter.requires_grad:
                raise RuntimeError(
                    f"{held.name} was frozen after the engine was built, which reads requires_grad "
                    f"once: build another engine and load a checkpoint"
                )

    def _is_placed(self, held: Held, start: int) -> bool:
        if self._blank is not None:
            return _lies_at(held.parameter, self._blank, 0)
        return _lies_at(held.parameter, self.data, start)


def _lies_at(tensor: Tensor | None, buffer: Tensor | None, start: int) -> bool:
    """Whether a tensor begins at this element of a buffer; one without elements lies anywhere."""
    if tensor is None or buffer is None:
        return tensor is buffer
    place = buffer.data_ptr() + start * buffer.element_size()
    return tensor.numel() == 0 or tensor.data_ptr() == place


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
