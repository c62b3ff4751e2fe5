"""The optimizer over what this rank updates: one flat tensor per (flat buffer, optimizer group)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..zero.flat import ALIGNMENT, Flat, Slot

Options = dict[str, Any]


class Updated(NamedTuple):
    """A part ``[start, stop)`` of a flat buffer that one optimizer parameter stands for."""

    flat: Flat
    start: int
    stop: int
    parameter: nn.Parameter


class ShardedOptimizer:
    """A torch optimizer of this rank's shards, with groups numbered over the whole model.

    Args:
        make: called with parameter groups, as ``torch.optim.AdamW`` is; elementwise.
        flats: whose ``updated`` parts are to be updated.
        groups: options of every group of the whole model; a rank may hold nothing of some.
        lr_schedule: factor of each group's learning rate, of the number of updates made.
    """

    def __init__(
        self,
        make: Callable[[list[Options]], torch.optim.Optimizer],
        flats: Sequence[Flat],
        groups: Sequence[Options],
        lr_schedule: Callable[[int], float] | None = None,
    ) -> None:
        self.updates = 0
        self.lr_schedule = lr_schedule
        self.updated: dict[int, list[Updated]] = {}
        for flat in flats:
            for group, start, stop in _group_ranges(flat):
                self.updated.setdefault(group, []).append(_updated(flat, start, stop))
        held = [
            {**options, "params": [part.parameter for part in self.updated[at]]}
            for at, options in enumerate(groups)
            if at in self.updated
        ]
        self.inner = make(held) if held else None
        # A rank that holds nothing of the first group still reports its learning rate.
        probe = {**(groups[0] if groups else {}), "params": [nn.Parameter(torch.zeros(1))]}
        self._first_lr = float(make([probe]).param_groups[0].get("lr", 0.0))
        for held_group in self.inner.param_groups if self.inner else []:
            held_group.setdefault("initial_lr", held_group.get("lr", 0.0))

    @property
    def lr(self) -> float:
        """Learning rate of the model's first group in the next update."""
        return self._first_lr * self._factor()

    def step(self) -> None:
        """One update at the learning rate of the schedule."""
        if self.inner is not None:
            for group in self.inner.param_groups:
                if "lr" in group:
                    group["lr"] = group["initial_lr"] * self._factor()
            self.inner.step()
        self.updates += 1

    def parts(self) -> list[Updated]:
        """Everything this rank updates, in group order."""
        return [part for group in sorted(self.updated) for part in self.updated[group]]

    def state(self, part: Updated) -> dict[str, Any]:
        """The optimizer's state of a part; filled by the first step."""
        return {} if self.inner is None else self.inner.state[part.parameter]

    def _factor(self) -> float:
        return 1.0 if self.lr_schedule is None else self.lr_schedule(self.updates)


def _group_ranges(flat: Flat) -> list[tuple[int, int, int]]:
    """``(group, start, stop)`` in the flat buffer of each group's part in what is updated here.

    Groups are contiguous; each runs up to the next one's start, so borders stay multiples of 64.
    """
    low, high = flat.updated
    starts: list[tuple[int, int]] = []
    for slot in flat.slots:
        if not starts or starts[-1][0] != slot.held.group:
            starts.append((slot.held.group, slot.start))
    ends = [start for _, start in starts[1:]] + [_end(flat.slots)]
    return [
        (group, max(start, low), min(end, high))
        for (group, start), end in zip(starts, ends, strict=True)
        if max(start, low) < min(end, high)
    ]


def _end(slots: list[Slot]) -> int:
    return -(-slots[-1].stop // ALIGNMENT) * ALIGNMENT if slots else 0


def _updated(flat: Flat, start: int, stop: int) -> Updated:
    low = flat.updated[0]
    parameter = nn.Parameter(flat.master[start - low : stop - low])
    parameter.grad = flat.updated_grad[start - low : stop - low]
    return Updated(flat, start, stop, parameter)


def is_elementwise_state(value: Any, part: Updated) -> bool:
    """Whether an optimizer state entry has one element for each of the part's."""
    return isinstance(value, Tensor) and value.shape == part.parameter.shape
