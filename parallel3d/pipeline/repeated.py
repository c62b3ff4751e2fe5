"""A segment that keeps its input, and makes its graph again right before the backward.

[Note: outlines] A segment that will be repeated is run with its graph all the same, and the graph
dropped at once. Only so is it known which outputs need a gradient, and only so are its kernels and
its compiled code those of the repeat. It needs no more memory than the repeat will.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves

from .segment import Segment, Unit
from .tape import Tape


class Away(Protocol):
    """Where kept values lie until they are needed."""

    def fetch(self) -> None:
        """Begin to bring them back."""

    def take(self) -> list[Any]:
        """Equal values, in order; once."""

    def here(self) -> list[Tensor]:
        """What of them lies on the device meanwhile."""


Put = Callable[[Sequence[Any], Sequence[Any]], Away]
"""Of values, and of the unit's outputs: what they share memory with others may write into."""


class Here:
    """Values that stay as they are."""

    def __init__(self, values: Sequence[Any], outputs: Sequence[Any] = ()) -> None:
        self.values = list(values)

    def fetch(self) -> None:
        """They are here."""

    def take(self) -> list[Any]:
        """The very values."""
        values, self.values = self.values, []
        return values

    def here(self) -> list[Tensor]:
        """All that are tensors."""
        return [value for value in self.values if isinstance(value, Tensor)]


class Repeated(Segment):
    """Keeps the input, and what its ``tape`` notes, where ``put`` puts them."""

    def __init__(
        self, unit: Unit, x: Any, seed: int, tape: Tape | None = None, put: Put = Here
    ) -> None:
        super().__init__(unit, x, seed)
        self.tape, self.put = tape, put
        self.away: Away = Here(())
        self.versions: list[int] = []

    def forward(self) -> Any:
        """Run the unit; its graph is dropped.

        Raises RuntimeError if the unit has written into its input or a buffer.
        """
        self.versions = self._versions()
        with self.tape.recording() if self.tape else nullcontext():
            outputs = super().forward()
        self.edges = []
        self._check_repeatable()
        self._put_away(tree_leaves(outputs))
        return outputs

    def fetch(self) -> None:
        """Begin to bring back what was put elsewhere."""
        self.away.fetch()

    def prepare(self) -> None:
        """Make the graph that ``forward`` has dropped, from the same input."""
        self._check_repeatable()
        values = self.away.take()
        self.leaves, noted = values[: self.spec.num_leaves], values[self.spec.num_leaves :]
        if self.tape:
            self.tape.put_back(noted)
        del values, noted
        needs = self.needs
        with self.tape.replaying() if self.tape else nullcontext():
            self.trace()
        if self.needs != needs:
            raise RuntimeError(
                f"unit {self.unit.name} gives outputs of which others need a gradient when its "
                f"forward is repeated: use recompute.mode=none"
            )

    def kept(self) -> list[Tensor]:
        """The input and what was noted, as far as they are here."""
        return self.away.here()

    def _put_away(self, outputs: list[Any]) -> None:
        """``leaves`` are from now on those of the input that stay as they are."""
        noted = self.tape.lift() if self.tape else ()
        self.away = self.put([*self.leaves, *noted], outputs)
        here = {id(tensor) for tensor in self.away.here()}
        self.leaves = [leaf for leaf in self.leaves if id(leaf) in here]
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        """How often what a repeated forward would start from has been written."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        return [tensor._version for tensor in (*tensors, *self.unit.module.buffers())]

    def _check_repeatable(self) -> None:
        if self.versions != self._versions():
            raise RuntimeError(
                f"unit {self.unit.name} changes its input or a buffer in place, so its forward "
                f"cannot be repeated: use recompute.mode=none, or let it work on a copy"
            )
