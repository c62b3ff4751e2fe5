"""A stage: consecutive units, and what its unfinished microbatches keep.

[Note: compiled layers] A compiler would trace a layer's backward into its graph, at a time when
nothing is to be deferred, and so nothing ever would. In a stage that splits the backward, layers
that can defer are therefore left out of the graphs of compiled units; the rest compiles around
them. Elsewhere they compile whole.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .activations import Activations
from .segment import Segment, Unit, hand_on

Deferred = tuple[nn.Parameter, Callable[[], Tensor]]


class Weights(Protocol):
    """Who has the parameters of the units, and what becomes of their gradients.

    Units are named by their number in the model.
    """

    def before_forward(self, unit: int) -> None:
        """The unit's parameters must be there when this returns."""

    def before_backward(self, unit: int, microbatch: int) -> None:
        """The same; and gradients of this microbatch will be added to those that are there.

        A repeated forward belongs to the backward.
        """

    def before_weight_grad(self, unit: int, microbatch: int) -> None:
        """More gradients will be added; the parameters are not needed."""

    def after_backward(self, unit: int, microbatch: int, reduce: bool) -> None:
        """All of the microbatch's gradients are there; with ``reduce`` they may be summed now."""


class AtHand:
    """Parameters that are always there."""

    def before_forward(self, unit: int) -> None:
        """Nothing."""

    def before_backward(self, unit: int, microbatch: int) -> None:
        """Nothing."""

    def before_weight_grad(self, unit: int, microbatch: int) -> None:
        """Nothing."""

    def after_backward(self, unit: int, microbatch: int, reduce: bool) -> None:
        """Nothing."""


class Stage:
    """Units run one after another, forward per microbatch and backward in reverse.

    Args:
        index: of the stage in the model.
        units: in order.
        activations: what a unit keeps between forward and backward.
        weights: told of each use of a unit's parameters.
        split: ``input_grad`` and ``weight_grad`` will be called instead of ``backward``; layers
            with a ``defer`` attribute are given one.

    An output that needs a gradient leaves as a tensor with ``requires_grad``; a border hands
    gradients on as a list, one for each floating leaf that needs one, in order.
    """

    def __init__(
        self,
        index: int,
        units: list[Unit],
        *,
        activations: Activations | None = None,
        weights: Weights | None = None,
        split: bool = False,
    ) -> None:
        self.index, self.units = index, units
        self.activations = activations or Activations()
        self.weights = weights or AtHand()
        self._kept: dict[int, list[Segment]] = {}
        self._deferred: dict[tuple[int, int], deque[Deferred]] = {}
        self._keeping: deque[Deferred] | None = None
        self._deferring: list[nn.Module] = []
        for unit in units if split else ():
            self._deferring += _make_defer(unit.module, self._defer)

    @property
    def in_flight(self) -> int:
        """Number of microbatches between forward and backward."""
        return len(self._kept)

    @property
    def deferred_parameters(self) -> tuple[int, int]:
        """Elements whose gradient ``weight_grad`` makes, and all elements that are trained."""
        late = {layer.weight for layer in self._deferring}
        trained = {p for unit in self.units for p in unit.module.parameters() if p.requires_grad}
        return sum(p.numel() for p in trained & late), sum(p.numel() for p in trained)

    def kept(self, microbatch: int) -> list[Tensor]:
        """What a microbatch's units keep on the device besides their graphs."""
        return [tensor for segment in self._kept[microbatch] for tensor in segment.kept()]

    def clear(self) -> None:
        """Forget unfinished microbatches, after an error."""
        self._kept.clear()
        self._deferred.clear()
        self._keeping = None

    def train(self, mode: bool) -> None:
        """Put the units into training or evaluation mode."""
        for unit in self.units:
            unit.module.train(mode)

    @torch.no_grad()
    def evaluate(self, x: Any, seed: int) -> Any:
        """Forward without gradients."""
        for unit in self.units:
            self.weights.before_forward(unit.number)
            with self._inside(unit):
                outputs, spec = unit.run(*tree_flatten(x), seed)
            x = hand_on(outputs, spec, [False] * len(outputs))
        return x

    def forward(self, microbatch: int, x: Any, seed: int) -> Any:
        """Run the units on ``x``, a pytree of tensors; ``seed`` keys their random numbers."""
        kept = self._kept[microbatch] = []
        for unit in self.units:
            self.weights.before_forward(unit.number)
            segment = self.activations.segment(unit, x, seed)
            with self._inside(unit):
                x = segment.forward()
            kept.append(segment)
        return x

    def backward(
        self, microbatch: int, gradients: list[Tensor], reduce: bool = False
    ) -> list[Tensor]:
        """From the gradients of the outputs that need one to those of the inputs that do.

        ``reduce`` is handed on to ``weights``, as each unit is done.
        The list ``gradients`` is emptied, so that none is kept longer than its unit needs it.
        """
        for unit, segment in self._finish(microbatch):
            with self._inside(unit):
                gradients = segment.backward(gradients)
            self.weights.after_backward(unit.number, microbatch, reduce)
        return gradients

    def input_grad(self, microbatch: int, gradients: list[Tensor]) -> list[Tensor]:
        """As ``backward``, but what layers defer of their weights' gradients waits.

        Everything else, and all of a unit whose layers defer nothing, is done here.
        """
        for unit, segment in self._finish(microbatch):
            self._keeping = self._deferred[microbatch, unit.number] = deque()
            with self._inside(unit):
                gradients = segment.backward(gradients)
            self._keeping = None
        return gradients

    @torch.no_grad()
    def weight_grad(self, microbatch: int, reduce: bool = False) -> None:
        """The rest of a microbatch's backward. ``reduce`` as in ``backward``."""
        for unit in reversed(self.units):
            self.weights.before_weight_grad(unit.number, microbatch)
            _add_gradients(self._deferred.pop((microbatch, unit.number)))
            self.weights.after_backward(unit.number, microbatch, reduce)

    def _defer(self, parameter: nn.Parameter, make: Callable[[], Tensor]) -> Tensor | None:
        if self._keeping is None:
            return make()
        self._keeping.append((parameter, make))
        return None

    def _finish(self, microbatch: int) -> Iterator[tuple[Unit, Segment]]:
        """The units in reverse with what they kept, ready for their backward.

        What one has put elsewhere begins to come back before the backward of the unit after it.
        """
        kept = self._kept.pop(microbatch)
        for unit in reversed(self.units):
            segment = kept.pop()
            for each in (segment, *kept[-1:]):
                each.fetch()
            self.weights.before_backward(unit.number, microbatch)
            with self._inside(unit):
                segment.prepare()
            yield unit, segment

    @contextmanager
    def _inside(self, unit: Unit) -> Iterator[None]:
        """An error in here says in which unit."""
        try:
            yield
        except Exception as error:
            module = type(unit.module).__name__
            error.add_note(f"in unit {unit.name} ({module}), stage {self.index}")
            raise


def _add_gradients(deferred: deque[Deferred]) -> None:
    """Make what one unit has deferred, in order, and let each go.

    Uses of a weight are summed first, as wide as its gradient, as autograd does, and added once
    the last is there.
    """
    uses = Counter(id(parameter) for parameter, _ in deferred)
    sums: dict[int, Tensor] = {}
    while deferred:
        parameter, make = deferred.popleft()
        key = id(parameter)
        assert parameter.grad is not None
        made = make().to(parameter.grad.dtype)
        sums[key] = sums[key] + made if key in sums else made
        uses[key] -= 1
        if not uses[key]:
            parameter.grad.add_(sums.pop(key))


def _make_defer(module: nn.Module, defer: Callable[..., Tensor | None]) -> list[nn.Module]:
    """Let the layers that can make their weight's gradient later do so; which these are."""
    layers = [layer for layer in module.modules() if hasattr(layer, "defer")]
    compiled = any(map(_is_compiled, module.modules()))
    for layer in layers:
        layer.defer = defer  # type: ignore[assignment]
        if compiled:
            layer.forward = torch.compiler.disable(layer.forward)
    return layers


def _is_compiled(module: nn.Module) -> bool:
    """By ``module.compile()``, or by ``torch.compile(module)``."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
