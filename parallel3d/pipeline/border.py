"""A border between two stages on different ranks: which tensors cross it, and when that is known.

[Note: shapes] What crosses is a function of the shapes of the microbatch's input. The first stage's
rank tells the others at the start of a step a number for each microbatch's input shapes. The first
message under a number is preceded by its description; from then on both ends know it, so that
receives can be posted ahead. A unit whose output shapes depend on values is refused.

[Note: flags] Which leaves need a gradient may change with every message, and the receiver must know
before its forward: torch chooses kernels by it, so a guess would change bits. So a message in
training begins with a byte for each leaf that could need one, from host to host. Only where that is
a single leaf, and it needed one when it was described, nothing is added: it is always taken to need
one, and a gradient that comes back for nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
    """A tensor that crosses."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def differentiable(self) -> bool:
        """Whether it could need a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex


class Description(NamedTuple):
    """What messages are made of, and whether each begins with flags."""

    spec: TreeSpec
    leaves: list[Leaf | None]
    flagged: bool

    def places(self) -> list[int]:
        """Where the leaves are that could need a gradient."""
        return [at for at, leaf in enumerate(self.leaves) if leaf and leaf.differentiable]


Key = tuple[bool, int]


class Border:
    """The way between stage ``index - 1`` and stage ``index``, seen from one of the two.

    ``activations`` and ``gradients`` are this rank's ends of the two channels. Leaves may be
    tensors of any dtype or None; anything else is a TypeError that names the stage. A key is
    whether the step trains, and the number of the microbatch's shapes.
    """

    def __init__(
        self, index: int, activations: Link, gradients: Link, device: torch.device
    ) -> None:
        self.index, self.device = index, device
        self.activations, self.gradients = activations, gradients
        self._known: dict[Key, Description] = {}

    def send_forward(self, y: Any, key: Key) -> list[Tensor]:
        """Send a pytree; returns empty look-alikes of the leaves whose gradient will come back.

        One of them without ``requires_grad`` stands for a gradient that nobody needs.
        """
        leaves, spec = tree_flatten(y)
        known = self._agree(leaves, spec, key)
        candidates = [leaves[at] for at in known.places()]
        message = [leaf.detach() for leaf in leaves if leaf is not None]
        if known.flagged:
            needs = [leaf.requires_grad for leaf in candidates]
            message.insert(0, torch.tensor(needs, dtype=torch.uint8, device="cpu"))
        self.activations.send(message)
        training, _ = key
        return [
            torch.empty_like(leaf, device="meta", requires_grad=leaf.requires_grad)
            for leaf in candidates
            if training and (leaf.requires_grad or not known.flagged)
        ]

    def post_forward(self, key: Key) -> Callable[[], Any]:
        """Post the receive of a pytree; the function returned waits for it."""
        if key not in self._known:
            tree, flagged = self.activations.receive_description()
            described, spec = tree_flatten(tree)
            self._known[key] = Description(spec, described, flagged)
        known = self._known[key]
        leaves = [None if leaf is None else self._buffer(leaf) for leaf in known.leaves]
        buffers, places = [leaf for leaf in leaves if leaf is not None], known.places()
        training, _ = key
        flags: list[Tensor] = []
        if known.flagged:
            flags.append(torch.empty(len(places), dtype=torch.uint8, device="cpu"))
        works = self.activations.post([*flags, *buffers])

        def wait() -> Any:
            for work in works:
                work.wait()
            needs = flags[0].tolist() if flags else [training] * len(places)
            for at, need in zip(places, needs, strict=True):
                leaf = leaves[at]
                assert leaf is not None
                leaf.requires_grad_(bool(need))
            return tree_unflatten(leaves, known.spec)

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
            return [to for to, output in zip(buffers, outputs, strict=True) if output.requires_grad]

        return wait

    def flush(self) -> None:
        """Wait until everything sent has gone."""
        self.activations.flush()
        self.gradients.flush()

    def _agree(self, leaves: list[Any], spec: TreeSpec, key: Key) -> Description:
        """The description of a message, which the receiver is told if it is the first."""
        described = [self._describe(leaf) for leaf in leaves]
        known = self._known.get(key)
        if known is None:
            new = Description(spec, described, flagged=False)
            training, _ = key
            needs = [leaves[at].requires_grad for at in new.places()]
            known = new._replace(flagged=training and needs not in ([], [True]))
            self._known[key] = known
            self.activations.send_description((tree_unflatten(described, spec), known.flagged))
        elif (known.spec, known.leaves) != (spec, described):
            raise RuntimeError(
                f"stage {self.index - 1} gives {_show(described)} where an input of the same "
                f"shapes gave {_show(known.leaves)} before: what a stage gives must depend on the "
                f"shapes of its input only"
            )
        return known

    def _describe(self, leaf: Any) -> Leaf | None:
        if leaf is None:
            return None
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"stage {self.index - 1} gives a {type(leaf).__name__} to stage {self.index}: only "
                f"tensors and None cross a border, in tuples, lists and dicts"
            )
        return Leaf(leaf.shape, leaf.dtype)

    def _buffer(self, leaf: Leaf) -> Tensor:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)


def _show(leaves: list[Leaf | None]) -> str:
    return ", ".join(
        "None" if leaf is None else f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves
    )
