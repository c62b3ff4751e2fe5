"""Kept inputs of units, cut over an axis on which every rank has the same.

[Note: replicated] What a unit is given is the same on every rank of tp, but where units are pieces
of a tensor-parallel region. Which it is, is asked of all ranks the first time, by sums over each
rank's bits. Later the sums of what comes back are compared with the own ones, so that an input that
was the same once by chance is found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..comm.collectives import Pending, all_reduce, start_all_gather
from ..topology import Axis
from .repeated import Away, Put
from .segment import Unit

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class KeptPart(NamedTuple):
    """What is left of a tensor of ``shape``: the sums over the bits of each rank's part of it."""

    shape: torch.Size
    sums: Tensor


class CutInputs:
    """Keeps a rank's part of every activation that is the same over the axis."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._same: dict[tuple[int, int], bool] = {}

    def of(self, unit: Unit, put: Put) -> Put:
        """Cuts the unit's inputs and puts the parts where ``put`` does."""
        return lambda values, outputs: _Cut(self, unit, values, lambda kept: put(kept, outputs))

    def is_same(self, unit: Unit, index: int, sums: Callable[[], Tensor]) -> bool:
        """Whether all ranks have one tensor there. Collective, the first time."""
        key = unit.number, index
        if key not in self._same:
            own = sums()
            # The largest of the sums and of their negatives: equal if all are.
            both = all_reduce(torch.cat([own, -own]), self.axis, op="max", tag="activations")
            self._same[key] = bool((both[: len(own)] == -both[len(own) :]).all())
        return self._same[key]


class _Cut:
    def __init__(
        self,
        owner: CutInputs,
        unit: Unit,
        values: Sequence[Any],
        put: Callable[[Sequence[Any]], Away],
    ) -> None:
        self.owner, self.unit = owner, unit
        self.pieces: list[KeptPart | None] = []
        self.gathers: list[tuple[Pending, Tensor]] = []
        kept = [self._cut(index, value) for index, value in enumerate(values)]
        self.inner: Away | None = put(kept)
        self.values: list[Any] = []

    def here(self) -> list[Tensor]:
        """The parts with their sums, and what is not cut."""
        sums = [piece.sums for piece in self.pieces if piece is not None]
        return sums + ([] if self.inner is None else self.inner.here())

    def fetch(self) -> None:
        """Begin to gather. Collective."""
        if self.inner is None:
            return
        self.inner.fetch()
        self.values, self.inner = self.inner.take(), None
        axis = self.owner.axis
        for value, piece in zip(self.values, self.pieces, strict=True):
            if piece is not None:
                out = value.new_empty(axis.size * value.numel())
                pending = start_all_gather(value.detach(), out, axis, tag="activations")
                self.gathers.append((pending, out))

    def take(self) -> list[Any]:
        """The whole values. Raises RuntimeError if the parts were not of one tensor."""
        self.fetch()
        gathers, values = iter(self.gathers), []
        for value, piece in zip(self.values, self.pieces, strict=True):
            values.append(value if piece is None else self._join(piece, next(gathers)[0].wait()))
        self.gathers, self.values = [], []
        return values

    def _cut(self, index: int, value: Any) -> Any:
        self.pieces.append(None)
        if not (isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()):
            return value
        parts = _parts(value.detach(), self.owner.axis.size)
        sums = _sums(parts)
        if not self.owner.is_same(self.unit, index, lambda: sums):
            return value
        self.pieces[-1] = KeptPart(value.shape, sums)
        return parts[self.owner.axis.rank].clone()

    def _join(self, piece: KeptPart, gathered: Tensor) -> Tensor:
        same = (_sums(gathered.view(self.owner.axis.size, -1)) == piece.sums).all()
        if gathered.device.type == "cuda":
            torch._assert_async(same)
        elif not same:
            raise RuntimeError(
                f"unit {self.unit.name} is given another input on each rank of "
                f"{self.owner.axis.name}, so it cannot be cut: use recompute.partition=false"
            )
        return gathered[: piece.shape.numel()].view(piece.shape).requires_grad_()


def _parts(tensor: Tensor, count: int) -> Tensor:
    """As so many equal rows; padded with zeros."""
    flat = tensor.contiguous().view(-1)
    return pad(flat, (0, -len(flat) % count)).view(count, -1)


def _sums(parts: Tensor) -> Tensor:
    """Of the bits of each row, as whole numbers."""
    return parts.view(BITS[parts.element_size()]).sum(1, dtype=torch.int64)
