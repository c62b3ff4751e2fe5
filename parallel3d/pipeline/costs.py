"""What the units of a model cost, and the stages made of them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class UnitCosts(NamedTuple):
    """What one unit costs for one microbatch.

    ``forward``, ``input_grad`` and ``weight_grad`` are times, in seconds or any other unit;
    ``saved`` the bytes kept from the forward to the input gradient, ``deferred`` those kept from
    there to the weight gradient, ``output`` those handed to the next unit.
    """

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0
    saved: int = 0
    deferred: int = 0
    output: int = 0


class Costs(NamedTuple):
    """What the stages of a pipeline cost for one microbatch: as in ``UnitCosts``, one of each a
    stage; ``comm`` is the time of one message between two ranks.
    """

    forward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    saved: tuple[int, ...]
    deferred: tuple[int, ...]
    output: tuple[int, ...]
    comm: float = 0.0


def stage_costs(
    units: Sequence[UnitCosts], cuts: Sequence[tuple[int, int]], comm: float = 0.0
) -> Costs:
    """Add up the units of each stage; ``cuts`` are the stages' ``(start, stop)`` of ``partition``.

    A stage hands on what its last unit does. Raises ValueError unless the cuts hold every unit
    once, in order.

    >>> stage_costs([UnitCosts(1, 2, 3), UnitCosts(4, 5, 6, output=8)], [(0, 2)]).forward
    (5,)
    """
    bounds = [0, *(stop for _, stop in cuts)]
    if list(cuts) != list(pairwise(bounds)) or bounds[-1] != len(units):
        raise ValueError(f"the cuts {list(cuts)} are not all of {len(units)} units, in order")
    stages = [units[start:stop] for start, stop in cuts]
    return Costs(
        forward=tuple(sum(unit.forward for unit in stage) for stage in stages),
        input_grad=tuple(sum(unit.input_grad for unit in stage) for stage in stages),
        weight_grad=tuple(sum(unit.weight_grad for unit in stage) for stage in stages),
        saved=tuple(sum(unit.saved for unit in stage) for stage in stages),
        deferred=tuple(sum(unit.deferred for unit in stage) for stage in stages),
        output=tuple(stage[-1].output if stage else 0 for stage in stages),
        comm=comm,
    )
