"""A unit, and a segment: its piece of the autograd graph of one microbatch.

[Note: segments] A unit is given detached leaves through an identity function, so that it may work
in place; the gradient edge of each output is kept and the output itself dropped once handed on. So
the moment a unit is about to be used, and the moment its gradients are complete, are known without
hooks, and recompute is per unit. The numbers are those of one graph over all units, bit for bit.

[Note: aliases] A unit's outputs that share memory are handed on as separate copies. A unit that
worked in place on one would change the other too, but only while both lie on one rank, and each
would get a gradient that knows nothing of the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..rng import reseed, seed_of

Outputs = tuple[list[Any], TreeSpec]


class Unit(NamedTuple):
    """One element of the model: its number and name in the whole model, and the module."""

    number: int
    name: str
    module: nn.Module

    def run(self, leaves: list[Any], spec: TreeSpec, seed: int) -> Outputs:
        """What the module makes of the pytree, with the random numbers of the unit's key."""
        reseed(seed_of(seed, self.number))
        return tree_flatten(self.module(tree_unflatten(leaves, spec)))


class Segment:
    """What a unit keeps of one microbatch until its backward: its input, and its graph.

    ``x`` is a pytree of leaves, ``seed`` the key of the microbatch's random numbers. In order:
    ``forward``, ``fetch`` a while before the backward, ``prepare`` right before it, ``backward``.
    """

    def __init__(self, unit: Unit, x: Any, seed: int) -> None:
        self.unit, self.seed = unit, seed
        self.leaves, self.spec = tree_flatten(x)
        self.needs: list[bool] = []
        self.edges: list[GradientEdge] = []

    def forward(self) -> Any:
        """Run the unit with a graph; the outputs come back as leaves of the next unit."""
        return hand_on(*self.trace(), self.needs)

    def fetch(self) -> None:
        """Begin to bring back what was put elsewhere."""

    def prepare(self) -> None:
        """Have all there that the backward needs."""

    def kept(self) -> list[Tensor]:
        """What is kept on the device besides the graph."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        """From the gradients of the outputs that need one to those of the inputs that do.

        All that was kept is let go, and so is what is in ``gradients``: the list is emptied.
        """
        edges, self.edges = self.edges, []
        assert len(edges) == len(gradients), "one gradient for each output that needs one"
        if edges:
            torch.autograd.backward(edges, gradients)
        del edges
        gradients.clear()
        leaves, self.leaves = self.leaves, []
        return [_take_gradient(leaf) for leaf in filter(_needs_grad, leaves)]

    def trace(self) -> Outputs:
        """Run the unit with a graph, whose edges are kept."""
        with torch.enable_grad():
            outputs, spec = self.unit.run(self.enter(), self.spec, self.seed)
        self.needs = [_needs_grad(output) for output in outputs]
        self.edges = [get_gradient_edge(output) for output in filter(_needs_grad, outputs)]
        return outputs, spec

    def enter(self) -> list[Any]:
        """The leaves as the unit is given them."""
        return [enter(leaf) for leaf in self.leaves]


class _Enter(Function):
    """The identity, so that a unit never sees the leaf itself and may work in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def enter(leaf: Any) -> Any:
    """A leaf as it is given to who may work on it in place."""
    return _Enter.apply(leaf) if _needs_grad(leaf) else leaf


def hand_on(outputs: list[Any], spec: TreeSpec, needs: list[bool]) -> Any:
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
    return tree_unflatten(handed, spec)


def _take_gradient(leaf: Tensor) -> Tensor:
    """Its gradient, which it no longer keeps: whoever still has the leaf does not need that."""
    gradient, leaf.grad = leaf.grad, None
    return torch.zeros_like(leaf) if gradient is None else _contiguous(gradient)


def _contiguous(tensor: Tensor) -> Tensor:
    """In the plain layout, which is how it could travel: no strides, no lazy conjugation."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
