"""Optimizers that look at a parameter as a whole, where each rank holds slices of it.

Such an optimizer is a ``Rule``: what it would compute over a whole parameter it computes over the
slices, and brings together what they give, over ``dp`` and ``tp`` at once for all parameters. Only
the slice that a rank owns is counted, at every ZeRO stage, and sums are made in rank order: so no
stage and no pipeline changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..comm.collectives import sum_in_order
from ..placement import Rectangle, Replicate, rectangles, whole_shape
from ..topology import Axis
from ..zero.flat import Flat, Held
from .bundle import State, Updated
from .make import Make, Options, made_for_trial
from .schedule import factor_of

Range = tuple[int, int]
Shapes = dict[str, tuple[int, ...]]


@dataclass(eq=False)
class Slice:
    """A parameter, and what this rank updates of it: elements ``[low, high)`` of its flat buffer.

    ``start`` is where the parameter begins there; ``shape`` is that of the whole one. A rank may
    update nothing of it.
    """

    held: Held
    flat: Flat
    start: int
    low: int
    high: int
    tp: Axis
    state: State = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return whole_shape(self.held.placement, tuple(self.held.parameter.shape))

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    @property
    def here(self) -> bool:
        """Whether there is anything to update."""
        return self.low < self.high

    @property
    def values(self) -> Tensor:
        """The masters [high - low]."""
        return self._of(self.flat.master)

    @property
    def grads(self) -> Tensor:
        """The gradients [high - low]."""
        return self._of(self.flat.updated_grad)

    @property
    def counted(self) -> Range:
        """Of ``values``, what this rank counts in sums over the parameter: each element once."""
        if isinstance(self.held.placement, Replicate) and self.tp.rank:
            return 0, 0
        low, high = (max(self.low, self.flat.owned[0]), min(self.high, self.flat.owned[1]))
        return (low - self.low, high - self.low) if low < high else (0, 0)

    def rectangles(self, part: Range) -> list[tuple[int, Rectangle]]:
        """``part`` of ``values`` as ``(offset in values, rectangle of the whole)``."""
        first = self.low - self.start
        found = rectangles(
            self.held.placement,
            tuple(self.held.parameter.shape),
            self.tp,
            first + part[0],
            first + part[1],
        )
        return [(part[0] + offset, place) for offset, place in found]

    @property
    def extent(self) -> tuple[int]:
        """The shape of ``values``."""
        return (self.high - self.low,)

    def _of(self, flat: Tensor) -> Tensor:
        first = self.flat.updated[0]
        return flat[self.low - first : self.high - first]


class UpdateContext(NamedTuple):
    """One step: its number from 1, the options of each group with the rate of this step."""

    number: int
    options: Sequence[Options]
    tp: Axis

    def of(self, each: Slice) -> Options:
        """The options of a slice's group."""
        return self.options[each.held.group]

    def total(self, sums: Tensor, flat: Flat) -> Tensor:
        """Flat ``sums`` of all ranks that hold slices of the same parameters as this one."""
        return sum_in_order(
            sum_in_order(sums, flat.axis, tag="optimizer"), self.tp, tag="optimizer"
        )


class Rule(Protocol):
    """What an optimizer does with the slices of a rank.

    All ranks of a ``dp`` and ``tp`` plane are given the same parameters in the same order.
    """

    name: str

    def check(self, name: str, shape: tuple[int, ...], options: Options) -> None:
        """Raise ValueError for a parameter that it cannot update."""

    def shapes(self, each: Slice, options: Options) -> Shapes:
        """Of the state of a slice, which is zeros before the first step.

        An entry of the shape of ``values`` is sharded as they are; any other is of the whole
        parameter, and has two dims or more.
        """

    def sent(self, slices: Sequence[Slice], options: Sequence[Options]) -> int:
        """Bytes that a step of this rank sends over ``dp``; options are those of each group."""

    def update(self, slices: Sequence[Slice], step: UpdateContext) -> None:
        """Write new ``values`` and states. Collective over the plane."""


class WholeOptimizer:
    """Applies a rule to this rank's flats; otherwise as ``ShardedOptimizer``.

    Args:
        rule: the optimizer's.
        flats: what this rank trains.
        options: of every group of the whole model, complete.
        tp: the tensor-parallel axis.
        lr_schedule: factor of each group's learning rate, of the number of updates made.
    """

    def __init__(
        self,
        rule: Rule,
        flats: Sequence[Flat],
        options: Sequence[Options],
        tp: Axis,
        lr_schedule: Callable[[int], float] | None = None,
    ) -> None:
        self.updates = 0
        self.rule, self.options, self.tp, self.lr_schedule = rule, options, tp, lr_schedule
        self.slices = [
            Slice(held, flat, start, max(start, flat.updated[0]), min(stop, flat.updated[1]), tp)
            for flat in flats
            for held, start, stop in flat.slots
            if start < stop
        ]
        self._made = False

    @property
    def lr(self) -> float:
        """Learning rate of the model's first group in the next update."""
        return float(self.options[0]["lr"]) * self._factor() if self.options else 0.0

    def step(self) -> None:
        """One update at the learning rate of the schedule. Collective over ``dp`` and ``tp``."""
        factor = self._factor()
        options = [{**each, "lr": each["lr"] * factor} for each in self.options]
        if not self._made:
            self._set(self.blank_states())
        self.updates += 1
        if self.slices:
            self.rule.update(self.slices, UpdateContext(self.updates, options, self.tp))

    def parts(self) -> list[Updated]:
        """Everything this rank updates, a part for each parameter."""
        return [Updated(s.flat, s.low, s.high, nn.Parameter(s.values)) for s in self._here()]

    def states(self) -> list[State]:
        """The state of each of ``parts()``; filled by the first step."""
        return [each.state for each in self._here()]

    def blank_states(self) -> list[State]:
        """States as before a first step, to be written over."""
        return [
            {name: each.values.new_zeros(shape) for name, shape in self._shapes(each).items()}
            for each in self._here()
        ]

    def predicted_bytes(self) -> int:
        """Of the state that a first step will make."""
        return sum(
            prod(shape) * each.values.element_size()
            for each in self._here()
            for shape in self._shapes(each).values()
        )

    def sent(self) -> int:
        """Bytes that a step of this rank sends over ``dp``."""
        return self.rule.sent(self.slices, self.options) if self.slices else 0

    def counters(self) -> dict[str, State]:
        """None: the number of updates is all."""
        return {}

    def restart(self, states: Sequence[State], updates: int, counters: Mapping[str, State]) -> None:
        """Go on from these states, or from none, after so many updates."""
        self._set(states)
        self.updates = updates

    def _set(self, states: Sequence[State]) -> None:
        self._made = bool(states)
        for each in self.slices:
            each.state = {}
        for each, state in zip(self._here(), states, strict=False):
            each.state = state

    def _shapes(self, each: Slice) -> Shapes:
        return self.rule.shapes(each, self.options[each.held.group])

    def _here(self) -> list[Slice]:
        return [each for each in self.slices if each.here]

    def _factor(self) -> float:
        return factor_of(self.lr_schedule, self.updates)


def options_of(make: Make, groups: Sequence[Options]) -> list[Options]:
    """Every group's options with the optimizer's own defaults, as it has checked them."""
    found = []
    for options in groups or [{}]:
        group: dict[str, Any] = made_for_trial(make, options).param_groups[0]
        found.append({key: value for key, value in group.items() if key != "params"})
    return found


def is_whole_state(value: Any, part: Updated) -> bool:
    """Whether an entry is a tensor of a part's whole parameter."""
    return isinstance(value, Tensor) and value.ndim >= 2 and value.shape != part.parameter.shape


class Unbound(torch.optim.Optimizer):
    """An optimizer by name and options alone: the engine has the rule for it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise RuntimeError: nothing but the engine knows whose slices are where."""
        raise RuntimeError(
            f"{type(self).__name__} takes its steps inside parallel3d.Engine only: pass it as "
            f"optimizer=, and do not call step()"
        )
