"""The optimizer over what this rank updates: one flat tensor per (flat buffer, optimizer group)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..zero.flat import ALIGNMENT, Flat, Slot

Options = dict[str, Any]
State = dict[str, Any]


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
        self._make = make
        self.updated: dict[int, list[Updated]] = {}
        for flat in flats:
            for group, start, stop in _group_ranges(flat):
                self.updated.setdefault(group, []).append(_updated(flat, start, stop))
        self.groups = [groups[at] for at in sorted(self.updated)]
        self.inner = self._over([part.parameter for part in self.parts()])
        # A rank that holds nothing of the first group still reports its learning rate.
        first = {**(groups[0] if groups else {}), "params": [nn.Parameter(torch.zeros(1))]}
        self._first_lr = float(make([first]).param_groups[0].get("lr", 0.0))
        self._initial_lrs = [group.get("lr") for group in self._inner_groups()]
        self._options = [_numbers(group) for group in self._inner_groups()]

    @property
    def lr(self) -> float:
        """Learning rate of the model's first group in the next update."""
        return self._first_lr * self._factor()

    def step(self) -> None:
        """One update at the learning rate of the schedule."""
        factor = self._factor()
        for group, lr in zip(self._inner_groups(), self._initial_lrs, strict=True):
            if lr is not None:
                group["lr"] = lr * factor
        if self.inner is not None:
            self.inner.step()
        self.updates += 1

    def parts(self) -> list[Updated]:
        """Everything this rank updates, in group order."""
        return [part for group in sorted(self.updated) for part in self.updated[group]]

    def states(self) -> list[State]:
        """The optimizer's state of each of ``parts()``; filled by the first step."""
        held: Mapping[Any, State] = {} if self.inner is None else self.inner.state
        return [held.get(part.parameter, {}) for part in self.parts()]

    def blank_states(self) -> list[State]:
        """States such as a first step makes, to be written over; nothing of ours is touched."""
        scratch = [nn.Parameter(torch.zeros_like(part.parameter)) for part in self.parts()]
        inner = self._over(scratch)
        if inner is None:
            return []
        for parameter in scratch:
            parameter.grad = torch.zeros_like(parameter)
        inner.step()
        return [inner.state[parameter] for parameter in scratch]

    def predicted_bytes(self) -> int:
        """Of the state that a first step will make, from that of 64 elements of each part."""
        scratch = [nn.Parameter(part.parameter.new_zeros(ALIGNMENT)) for part in self.parts()]
        inner = self._over(scratch)
        if inner is None:
            return 0
        for parameter in scratch:
            parameter.grad = torch.zeros_like(parameter)
        inner.step()
        total = 0
        for part, parameter in zip(self.parts(), scratch, strict=True):
            tensors = [t for t in inner.state[parameter].values() if isinstance(t, Tensor)]
            per_element = sum(t.element_size() for t in tensors if t.shape == parameter.shape)
            total += per_element * part.parameter.numel()
        return total

    def counters(self) -> dict[str, State]:
        """Numbers that the optimizer keeps in its groups, such as a count of steps, by group."""
        groups = zip(sorted(self.updated), self._inner_groups(), self._options, strict=False)
        return {
            str(at): {key: n for key, n in _numbers(group).items() if options.get(key) != n}
            for at, group, options in groups
        }

    def restart(self, states: Sequence[State], updates: int, counters: Mapping[str, State]) -> None:
        """Go on from these states and counters, or from none, after so many updates."""
        self.inner = self._over([part.parameter for part in self.parts()])
        for at, group in zip(sorted(self.updated), self._inner_groups(), strict=False):
            group.update(counters.get(str(at), {}))
        if self.inner is not None:
            for part, state in zip(self.parts(), states, strict=False):
                self.inner.state[part.parameter] = state
        self.updates = updates

    def _over(self, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer | None:
        """The torch optimizer over one parameter for each of ``parts()``; None over nothing."""
        left, held = list(parameters), []
        for options, at in zip(self.groups, sorted(self.updated), strict=True):
            count = len(self.updated[at])
            held.append({**options, "params": left[:count]})
            left = left[count:]
        return self._make(held) if held else None

    def _inner_groups(self) -> list[Options]:
        return [] if self.inner is None else self.inner.param_groups

    def _factor(self) -> float:
        return 1.0 if self.lr_schedule is None else float(self.lr_schedule(self.updates))


def _numbers(group: Options) -> State:
    numbers = {key: n for key, n in group.items() if isinstance(n, int | float)}
    numbers.pop("lr", None)
    return numbers


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
