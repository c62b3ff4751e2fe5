"""Parts of flat buffers that one torch optimizer updates in one call, and their state meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..zero.flat import ALIGNMENT, Flat
from ..zero.store import Room, Store
from .make import Make, Options

State = dict[str, Any]


class Updated(NamedTuple):
    """A part ``[start, stop)`` of a flat buffer that one optimizer parameter stands for."""

    flat: Flat
    start: int
    stop: int
    parameter: nn.Parameter


class Span(NamedTuple):
    """A part ``[start, stop)`` of a flat buffer, of one optimizer group."""

    group: int
    flat: Flat
    start: int
    stop: int


class Keeping(NamedTuple):
    """How the state of parts is kept between updates.

    ``dtype`` is that of elementwise numbers, None for the masters' own; ``store`` has the memory,
    None for the device's.
    """

    dtype: torch.dtype | None = None
    store: Store | None = None

    def dtype_of(self, value: Tensor) -> torch.dtype:
        """In which an elementwise entry is kept."""
        narrow = self.dtype is not None and value.is_floating_point()
        return self.dtype if narrow and self.dtype else value.dtype


class Bundle:
    """One torch optimizer, with the groups of the whole model of which it has something.

    Args:
        make: called with parameter groups.
        groups: options of every group of the whole model.
        spans: what it updates; masters as they lie now.
        unit: by which a store knows the parts.
        keeping: None where the optimizer's own state is what is kept.
    """

    def __init__(
        self,
        make: Make,
        groups: Sequence[Options],
        spans: Sequence[Span],
        unit: int = 0,
        keeping: Keeping | None = None,
    ) -> None:
        self._make, self._groups, self._unit, self._keeping = make, groups, unit, keeping
        self.spans = sorted(spans, key=lambda span: span.group)
        self.parts = [_updated(span) for span in self.spans]
        self._kept: dict[nn.Parameter, State] = {}
        self.restart({}, {})
        self._initial_lrs = [group.get("lr") for group in self.inner.param_groups]
        self._options = [_numbers(group) for group in self.inner.param_groups]

    def lrs(self, factor: float) -> list[Any]:
        """Of each group of the optimizer, None where it has none."""
        return [None if lr is None else lr * factor for lr in self._initial_lrs]

    def step(self, lrs: Sequence[Any], gradients: Mapping[Flat, Tensor] | None = None) -> None:
        """One update, with ``gradients`` of what each flat updates, or those that lie there."""
        for group, lr in zip(self.inner.param_groups, lrs, strict=True):
            if lr is not None:
                group["lr"] = lr
        if gradients is not None:
            for part in self.parts:
                low = part.flat.updated[0]
                part.parameter.grad = gradients[part.flat][part.start - low : part.stop - low]
        if self._keeping is None:
            self.inner.step()
            return
        for parameter, state in self._kept.items():
            self.inner.state[parameter] = {
                name: _widened(value, parameter, self._keeping.dtype)
                for name, value in state.items()
            }
        self.inner.step()
        for at, part in enumerate(self.parts):
            state = self.inner.state.pop(part.parameter, {})
            self._kept[part.parameter] = {
                name: self._keep(at, name, value) for name, value in state.items()
            }

    def state(self, part: Updated) -> State:
        """Of one of ``parts``, as it is kept; empty before the first step."""
        held: Mapping[Any, State] = self.inner.state if self._keeping is None else self._kept
        return held.get(part.parameter, {})

    def blank_states(self) -> list[State]:
        """Of each part, as a first step makes them, to be written over.

        In a store they are the memory of the ones in use, and as those are.
        """
        if self._keeping is not None and self._kept:
            states = [self._kept[part.parameter] for part in self.parts]
            return [_twin(state, p.parameter) for state, p in zip(states, self.parts, strict=True)]
        scratch = [torch.zeros_like(part.parameter) for part in self.parts]
        states = first_states(self._make, self._groups, self.spans, scratch)
        if self._keeping is None:
            return states
        return [
            {name: self._keep(at, name, value) for name, value in state.items()}
            for at, state in enumerate(states)
        ]

    def counters(self) -> dict[str, State]:
        """Numbers that the optimizer keeps in its groups, such as a count of steps, by group."""
        held = zip(self._held_groups(), self.inner.param_groups, self._options, strict=True)
        return {
            str(at): {key: n for key, n in _numbers(group).items() if options.get(key) != n}
            for at, group, options in held
        }

    def restart(self, states: Mapping[nn.Parameter, State], counters: Mapping[str, State]) -> None:
        """Go on from these states and counters, or from none."""
        parameters = [part.parameter for part in self.parts]
        self.inner = _over(self._make, self._groups, self.spans, parameters)
        for at, group in zip(self._held_groups(), self.inner.param_groups, strict=True):
            group.update(counters.get(str(at), {}))
        mine = {parameter: states[parameter] for parameter in parameters if parameter in states}
        if self._keeping is None:
            for parameter, state in mine.items():
                self.inner.state[parameter] = state
        else:
            self._kept = mine

    def _held_groups(self) -> list[int]:
        return sorted({span.group for span in self.spans})

    def _keep(self, at: int, name: str, value: Any) -> Any:
        """An entry of a part's state, where and as it is kept."""
        part, keeping = self.parts[at], self._keeping
        if keeping is None or not is_elementwise_state(value, part):
            return value
        before = self._kept.get(part.parameter, {}).get(name)
        if before is None:
            before = self._room(state_name(at, name), value, keeping)
        return before if before is value else before.copy_(value)

    def _room(self, name: str, value: Tensor, keeping: Keeping) -> Tensor:
        if keeping.store is not None and keeping.store.has(self._unit, name):
            return keeping.store.tensor(self._unit, name)
        return torch.empty_like(value, dtype=keeping.dtype_of(value))


def first_states(
    make: Make, groups: Sequence[Options], spans: Sequence[Span], values: Sequence[Tensor]
) -> list[State]:
    """The states of an optimizer over these values, one for each span, after a step on zeros."""
    if not spans:
        return []
    scratch = [nn.Parameter(value) for value in values]
    inner = _over(make, groups, spans, scratch)
    for parameter in scratch:
        parameter.grad = torch.zeros_like(parameter)
    inner.step()
    return [inner.state[parameter] for parameter in scratch]


def rooms_of(
    make: Make,
    groups: Sequence[Options],
    spans: Sequence[Span],
    keeping: Keeping,
) -> list[dict[str, Room]]:
    """What the elementwise state of each span will take, found on 64 elements."""
    device = None if keeping.store is None else torch.device("cpu")
    values = [s.flat.master.new_zeros(ALIGNMENT, device=device) for s in spans]
    return [
        {
            name: Room(span.stop - span.start, keeping.dtype_of(value))
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == (ALIGNMENT,)
        }
        for span, state in zip(spans, first_states(make, groups, spans, values), strict=True)
    ]


def state_name(at: int, name: str) -> str:
    """Of an entry of a part's state, in a store."""
    return f"part {at}/{name}"


def is_elementwise_state(value: Any, part: Updated) -> bool:
    """Whether an optimizer state entry has one element for each of the part's."""
    return isinstance(value, Tensor) and value.shape == part.parameter.shape


def _updated(span: Span) -> Updated:
    flat, low = span.flat, span.flat.updated[0]
    parameter = nn.Parameter(flat.master[span.start - low : span.stop - low])
    if flat.updated_grad.device == parameter.device:
        parameter.grad = flat.updated_grad[span.start - low : span.stop - low]
    return Updated(flat, span.start, span.stop, parameter)


def _over(
    make: Make,
    groups: Sequence[Options],
    spans: Sequence[Span],
    parameters: Sequence[nn.Parameter],
) -> torch.optim.Optimizer:
    """The torch optimizer over one parameter for each span, in the order of groups."""
    held: dict[int, list[nn.Parameter]] = {}
    for span, parameter in zip(spans, parameters, strict=True):
        held.setdefault(span.group, []).append(parameter)
    return make([{**groups[at], "params": held[at]} for at in sorted(held)])


def _widened(value: Any, parameter: nn.Parameter, narrow: torch.dtype | None) -> Any:
    if isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype == narrow:
        return value.to(parameter.dtype)
    return value


def _twin(state: State, parameter: nn.Parameter) -> State:
    """The same memory where it is elementwise, and numbers of its own."""
    return {
        name: value.clone()
        if isinstance(value, Tensor) and value.shape != parameter.shape
        else value
        for name, value in state.items()
    }


def _numbers(group: Options) -> State:
    numbers = {key: n for key, n in group.items() if isinstance(n, int | float)}
    numbers.pop("lr", None)
    return numbers
