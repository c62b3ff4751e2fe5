"""A stage: consecutive units, and what its unfinished microbatches keep.

[Note: segments] Each unit is its own piece of the autograd graph. It is given detached leaves
through an identity function, so that it may work in place; the gradient edge of each output is
kept and the output itself dropped once handed on. So the moment a unit is about to be used, and
the moment its gradients are complete, are known without hooks, and recompute is per unit. The
numbers are those of one graph over all units, bit for bit.

[Note: aliases] A unit's outputs that share memory are handed on as separate copies. A unit that
worked in place on one would change the other too, but only while both lie on one rank, and each
would get a gradient that knows nothing of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..rng import reseed, seed_of


class Unit(NamedTuple):
    """One element of the model: its number and name in the whole model, and the module."""

    number: int
    name: str
    module: nn.Module


@dataclass
class Segment:
    """What one unit keeps of one microbatch until its backward."""

    leaves: list[Any]
    spec: TreeSpec
    edges: list[GradientEdge | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


Deferred = tuple[nn.Parameter, Callable[[], Tensor]]


def _nothing(unit: int) -> None:
    """The default of ``before`` and ``after``."""


class Stage:
    """Units run one after another, forward per microbatch and backward in reverse.

    Args:
        index: of the stage in the model.
        units: in order.
        recompute: keep a unit's input only, and run its forward again in backward.
        before: called with a unit's index right before each of its forwards.
        after: called with a unit's index when a backward marked ``last`` has completed it.
        check: called with a unit's index after each of its backwards.
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
        recompute: bool = False,
        before: Callable[[int], None] = _nothing,
        after: Callable[[int], None] = _nothing,
        check: Callable[[int], None] = _nothing,
        split: bool = False,
    ) -> None:
        self.index, self.units, self.recompute = index, units, recompute
        self.before, self.after, self.check = before, after, check
        self._deferred: dict[tuple[int, int], list[Deferred]] = {}
        self._keeping: list[Deferred] | None = None
        for unit in units if split else ():
            for module in unit.module.modules():
                if hasattr(module, "defer"):
                    module.defer = self._defer  # type: ignore[assignment]
        self._kept: dict[int, tuple[int, list[Segment]]] = {}

    @property
    def in_flight(self) -> int:
        """Number of microbatches between forward and backward."""
        return len(self._kept)

    def clear(self) -> None:
        """Forget unfinished microbatches, after an error."""
        self._kept.clear()
        self._deferred.clear()
        self._keeping = None

    def train(self, mode: bool) -> None:
        """Put the units into training or evaluation mode."""
        for unit in self.units:
            unit.module.train(mode)

    def evaluate(self, x: Any, seed: int) -> Any:
        """Forward without gradients."""
        with torch.no_grad():
            for unit in self.units:
                self.before(unit.number)
                outputs, spec = self._run(unit, *tree_flatten(x), seed)
                x = tree_unflatten(_hand_on(outputs, [False] * len(outputs)), spec)
        return x

    def forward(self, microbatch: int, x: Any, seed: int) -> Any:
        """Run the units on ``x``, a pytree of tensors; ``seed`` keys their random numbers."""
        kept: list[Segment] = []
        self._kept[microbatch] = seed, kept
        forward = self._outline if self.recompute else self._trace
        for unit in self.units:
            self.before(unit.number)
            segment = Segment(*tree_flatten(x))
            x = forward(unit, segment, seed)
            kept.append(segment)
        return x

    def backward(
        self, microbatch: int, gradients: list[Tensor], last: bool = False
    ) -> list[Tensor]:
        """From the gradients of the outputs that need one to those of the inputs that do.

        ``last`` marks the stage's last backward of the step: ``after`` is called for each unit.
        """
        for unit, segment in self._finish(microbatch):
            gradients = _backward(segment, gradients)
            self.check(unit.number)
            if last:
                self.after(unit.number)
        return gradients

    def input_grad(self, microbatch: int, gradients: list[Tensor]) -> list[Tensor]:
        """As ``backward``, but what layers defer of their weights' gradients waits.

        Everything else, and all of a unit whose layers defer nothing, is done here.
        """
        for unit, segment in self._finish(microbatch):
            self._keeping = self._deferred[microbatch, unit.number] = []
            gradients = _backward(segment, gradients)
            self._keeping = None
        return gradients

    @torch.no_grad()
    def weight_grad(self, microbatch: int, last: bool = False) -> None:
        """The rest of a microbatch's backward. ``last`` as in ``backward``."""
        for unit in reversed(self.units):
            sums: dict[int, tuple[nn.Parameter, Tensor]] = {}
            for parameter, make in self._deferred.pop((microbatch, unit.number)):
                # Uses of a weight in one unit are summed first, as autograd does.
                known = sums.get(id(parameter))
                sums[id(parameter)] = parameter, make() if known is None else known[1] + make()
            for parameter, gradient in sums.values():
                assert parameter.grad is not None
                parameter.grad.add_(gradient)
            self.check(unit.number)
            if last:
                self.after(unit.number)

    def _defer(self, parameter: nn.Parameter, make: Callable[[], Tensor]) -> Tensor | None:
        if self._keeping is None:
            return make()
        self._keeping.append((parameter, make))
        return None

    def _finish(self, microbatch: int) -> Iterator[tuple[Unit, Segment]]:
        """The units in reverse with what they kept, ready for their backward."""
        seed, kept = self._kept.pop(microbatch)
        for unit in reversed(self.units):
            segment = kept.pop()
            if self.recompute:
                self._again(unit, segment, seed)
            yield unit, segment

    def _trace(self, unit: Unit, segment: Segment, seed: int) -> Any:
        """Forward with a graph; the outputs come back as leaves of the next unit."""
        with torch.enable_grad():
            leaves = [enter(leaf) for leaf in segment.leaves]
            outputs, spec = self._run(unit, leaves, segment.spec, seed)
        needs = [_needs_grad(output) for output in outputs]
        segment.edges = [
            get_gradient_edge(output) for output, need in zip(outputs, needs, strict=True) if need
        ]
        return tree_unflatten(_hand_on(outputs, needs), spec)

    def _outline(self, unit: Unit, segment: Segment, seed: int) -> Any:
        """Forward without a graph: an output may need a gradient if any part does."""
        segment.versions = _versions(unit, segment)
        with torch.no_grad():
            outputs, spec = self._run(unit, segment.leaves, segment.spec, seed)
        _check_repeatable(unit, segment)
        may = _may_need_grad(unit, segment)
        needs = [may and _differentiable(output) for output in outputs]
        return tree_unflatten(_hand_on(outputs, needs), spec)

    def _again(self, unit: Unit, segment: Segment, seed: int) -> None:
        """Run a unit's forward again, now with a graph, from the input it was given."""
        self.before(unit.number)
        _check_repeatable(unit, segment)
        with torch.enable_grad():
            leaves = [enter(leaf) for leaf in segment.leaves]
            outputs, _ = self._run(unit, leaves, segment.spec, seed)
        if _may_need_grad(unit, segment):
            segment.edges = [
                get_gradient_edge(output) if output.requires_grad else None
                for output in filter(_differentiable, outputs)
            ]

    def _run(
        self, unit: Unit, leaves: list[Any], spec: TreeSpec, seed: int
    ) -> tuple[list[Any], TreeSpec]:
        """The leaves of what a unit makes of ``leaves``, with the random numbers of its key."""
        reseed(seed_of(seed, unit.number))
        try:
            return tree_flatten(unit.module(tree_unflatten(leaves, spec)))
        except Exception as error:
            error.add_note(
                f"in unit {unit.name} ({type(unit.module).__name__}), stage {self.index}"
            )
            raise


class _Enter(Function):
    """The identity, so that a unit never sees the leaf itself and may work in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _backward(segment: Segment, gradients: list[Tensor]) -> list[Tensor]:
    pairs = [
        (edge, gradient)
        for edge, gradient in zip(segment.edges, gradients, strict=True)
        if edge is not None
    ]
    if pairs:
        edges, values = zip(*pairs, strict=True)
        torch.autograd.backward(edges, values)
    return [
        torch.zeros_like(leaf) if leaf.grad is None else _contiguous(leaf.grad)
        for leaf in filter(_needs_grad, segment.leaves)
    ]


def enter(leaf: Any) -> Any:
    """A leaf as it is given to who may work on it in place."""
    return _Enter.apply(leaf) if _needs_grad(leaf) else leaf


def _hand_on(outputs: list[Any], needs: list[bool]) -> list[Any]:
    """Outputs as leaves of the next unit: contiguous, and no two of them in one memory."""
    handed, seen = [], set()
    for output, need in zip(outputs, needs, strict=True):
        if isinstance(output, Tensor):
            output = _contiguous(output.detach())
            address = output.untyped_storage().data_ptr()
            if address in seen:
                output = output.clone()
            seen.add(address)
            output.requires_grad_(need)
        handed.append(output)
    return handed


def _contiguous(tensor: Tensor) -> Tensor:
    """In the plain layout, which is how it could travel: no strides, no lazy conjugation."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _versions(unit: Unit, segment: Segment) -> list[int]:
    """How often what a repeated forward would start from has been written."""
    tensors = [leaf for leaf in segment.leaves if isinstance(leaf, Tensor)]
    return [tensor._version for tensor in (*tensors, *unit.module.buffers())]


def _check_repeatable(unit: Unit, segment: Segment) -> None:
    if segment.versions != _versions(unit, segment):
        raise RuntimeError(
            f"unit {unit.name} changes its input or a buffer in place, so its forward cannot be "
            f"repeated: use recompute.mode=none, or let it work on a copy"
        )


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _may_need_grad(unit: Unit, segment: Segment) -> bool:
    trained = any(parameter.requires_grad for parameter in unit.module.parameters())
    return trained or any(_needs_grad(leaf) for leaf in segment.leaves)


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
