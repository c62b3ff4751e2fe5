"""In which order a program needs the parameters of units, and works on their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..pipeline.actions import Action, Op
from ..zero.accounts import Touch

_ASCENDING, _DESCENDING = {Op.FORWARD}, {Op.BACKWARD, Op.INPUT_GRAD}
_GRADIENTS = {*_DESCENDING, Op.WEIGHT_GRAD}


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


def uses_here(
    actions: Iterable[Action], units: Mapping[int, Sequence[int]], count: int
) -> list[bool]:
    """Of each of ``uses_of(actions)``, whether its microbatch is among the first ``count``."""
    return [a.microbatch < count for a in actions for _ in uses_of([a], units)]


def touches_of(actions: Iterable[Action], units: Mapping[int, Sequence[int]]) -> list[Touch]:
    """Each time that the program works on a unit's gradients, as a stage tells its weights."""
    touches: list[Touch] = []
    reducing: set[int] = set()
    for stage, op, microbatch in actions:
        if op is Op.REDUCE:
            reducing.add(stage)
        for unit in reversed(units[stage]) if op in _GRADIENTS else ():
            touches.append(Touch(unit, microbatch))
            if op is not Op.INPUT_GRAD:
                touches.append(Touch(unit, microbatch, True, stage in reducing))
    return touches
