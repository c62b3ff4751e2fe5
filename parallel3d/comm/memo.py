"""Results of collectives that a repeated forward takes from the first, instead of sending again."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ..topology import Axis


class Memo(Protocol):
    """Has, or is given, the results of the collectives of one forward, in order.

    Ranks that repeat a forward have the same memo, so either all send or none does.
    """

    def knows(self, result: Tensor) -> bool:
        """Fill ``result`` with what the collective gave, and say so.

        False where that is not known: the result is then kept, if this is the first forward.
        """


def knows(axis: Axis, result: Tensor) -> bool:
    """Whether the axis's memo has filled ``result``, so that nothing is to be sent."""
    memo: Memo | None = axis.memos[-1] if axis.memos else None
    return memo is not None and memo.knows(result)
