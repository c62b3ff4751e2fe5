"""A border between two stages on different ranks: which tensors cross it, and when that is known.

[Note: shapes] What crosses is a function of the shapes of the microbatch's input. The first stage's
rank tells the others at the start of a step a number for each microbatch's input shapes. The first
message under a number is preceded by its description; from then on both ends know it, so that
receives can be posted ahead. A unit whose output shapes depend on values is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Link(Protocol):
    """What a border needs of a channel (see ``comm.p2p.Channel``)."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Hand over tensors."""

    def post(self, buffers: Sequence[Tensor]) -> list[Any]:
        """Post receives; each result has a ``wait()``."""

    def send_description(self, description: Any) -> None:
        """Say what the next message is made of."""

    def receive_description(self) -> Any:
        """Wait for what ``send_description`` says."""

    def flush(self) -> None:
        """Wait until everything sent has gone."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that crosses: shape, dtype, and whether its gradient comes back."""

    shape: torch.Size
    dtype: torch.dtype
    needs_grad: bool


Description = tuple[TreeSpec, list[Leaf | None]]
Key = tuple[bool, int]


class Border:
    """The way between stage ``index - 1`` and stage ``index``, seen from one of the two.

    ``activations`` and ``gradients`` are this rank's ends of the two channels. Leaves may be
    tensors of any dtype or None; anything else is a TypeError that names the stage.
    """

    def __init__(
        self, index: int, activations: Link, gradients: Link, device: torch.device
    ) -> None:
        self.index, self.device = index, device
        self.activations, self.gradients = activations, gradients
        self._known: dict[Key, Description] = {}

    def send_forward(self, y: Any, key: Key) -> list[Tensor]:
        """Send a pytree; returns empty look-alikes of the leaves whose gradient will come back."""
        leaves, spec = tree_flatten(y)
        description = spec, [self._describe(leaf) for leaf in leaves]
        known = self._known.setdefault(key, description)
        if known is description:
            self.activations.send_description(tree_unflatten(description[1], spec))
        elif known != description:
            raise RuntimeError(
                f"stage {self.index - 1} gives {_show(description)} where an input of the same "
                f"shapes gave {_show(known)} before: what a stage gives must depend on the shapes "
                f"of its input only"
            )
        tensors = [leaf for leaf in leaves if leaf is not None]
        self.activations.send([tensor.detach() for tensor in tensors])
        return [torch.empty_like(t, device="meta") for t in tensors if t.requires_grad]

    def post_forward(self, key: Key) -> Callable[[], Any]:
        """Post the receive of a pytree; the function returned waits for it."""
        if key not in self._known:
            described, spec = tree_flatten(self.activations.receive_description())
            self._known[key] = spec, described
        spec, described = self._known[key]
        leaves = [None if leaf is None else self._buffer(leaf) for leaf in described]
        works = self.activations.post([leaf for leaf in leaves if leaf is not None])

        def wait() -> Any:
            for work in works:
                work.wait()
            for leaf, about in zip(leaves, described, strict=True):
                if leaf is not None and about is not None:
                    leaf.requires_grad_(about.needs_grad)
            return tree_unflatten(leaves, spec)

        return wait

    def send_backward(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of what this rank received."""
        self.gradients.send(gradients)

    def post_backward(self, outputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Post the receive of the gradients of what this rank sent."""
        buffers = [torch.empty_like(output, device=self.device) for output in outputs]
        works = self.gradients.post(buffers)

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            return buffers

        return wait

    def flush(self) -> None:
        """Wait until everything sent has gone."""
        self.activations.flush()
        self.gradients.flush()

    def _describe(self, leaf: Any) -> Leaf | None:
        if leaf is None:
            return None
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"stage {self.index - 1} gives a {type(leaf).__name__} to stage {self.index}: only "
                f"tensors and None cross a border, in tuples, lists and dicts"
            )
        return Leaf(leaf.shape, leaf.dtype, leaf.requires_grad)

    def _buffer(self, leaf: Leaf) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)


def _show(description: Description) -> str:
    texts = []
    for leaf in description[1]:
        gradient = " with gradient" if leaf is not None and leaf.needs_grad else ""
        texts.append("None" if leaf is None else f"{tuple(leaf.shape)} {leaf.dtype}{gradient}")
    return ", ".join(texts)
