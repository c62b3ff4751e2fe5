"""In which order a program needs the parameters of units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..pipeline.actions import Action, Op

_ASCENDING, _DESCENDING = {Op.FORWARD}, {Op.BACKWARD, Op.INPUT_GRAD}


def uses_of(actions: Iterable[Action], units: Mapping[int, Sequence[int]]) -> list[int]:
    """The units' numbers; ``units`` are those of each stage, in order.

    A backward needs what its forward needed, the last unit first. The weights' gradients need only
    what the layers have kept.
    """
    uses: list[int] = []
    for action in actions:
        if action.op in _ASCENDING:
            uses += units[action.stage]
        elif action.op in _DESCENDING:
            uses += reversed(units[action.stage])
    return uses
