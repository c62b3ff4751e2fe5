"""The cost-aware zero-bubble heuristic: orders for measured times and a limit of memory.

Forwards and input gradients keep a rhythm (Qi et al. 2024), weight gradients fill the time in which
a rank would wait (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 3.1). A grid of
rhythms is tried, from the one that keeps least to the one that waits least.
"""

from bisect import bisect_left
from collections.abc import Iterator
from math import inf
from operator import add

from parallel3d.pipeline.actions import Action, Op, Schedule
from parallel3d.pipeline.costs import Costs
from parallel3d.pipeline.filling import Filling
from parallel3d.pipeline.rhythm import (
    Orders,
    Stretch,
    building_block,
    one_at_a_time,
    repeat,
    shortest_period,
)

_STRETCHES = (Stretch(1, 1), Stretch(2, 1), Stretch(3, 1.5), Stretch(4, 2), Stretch(6, 3))
_SLOWER = (1.0, 1.07, 1.15, 1.25, 1.4, 1.6, 2.0, 2.5, 3.0, 4.0)
_PATIENCE = (0.0, 0.5, 1.0)
_PARTS = 256


def greedy(
    costs: Costs,
    homes: list[int],
    num_microbatches: int,
    memory_limit: float | None = None,
    split: bool = True,
) -> Schedule:
    """Make the fastest order that the grid has for stages that live on the ranks ``homes``.

    No rank keeps more than ``memory_limit`` bytes: activations, what weight gradients wait with,
    outputs not yet taken. Without a limit, or where less will do, the order keeps no more than its
    speed needs. ``split`` False leaves backwards whole, which defers no bytes. Raises ValueError if
    the limit is below what one microbatch at a time keeps.
    """
    costs = costs if split else _whole(costs)
    limit = inf if memory_limit is None else memory_limit
    best: Filling | None = None
    for orders in _orders(costs, homes, num_microbatches):
        for patience in _PATIENCE if split else _PATIENCE[:1]:
            run = Filling(costs, homes, orders, limit, patience)
            if run.is_whole and (best is None or run.makespan < best.makespan * (1 - 1e-9)):
                best = run
    if best is None:
        raise ValueError(
            f"a limit of {limit:.0f} bytes, but one microbatch at a time keeps"
            f" {least_bytes(costs, homes)}: allow that much, or make microbatches smaller"
        )
    program = _lean(best).program
    return Schedule(
        program if split else [_join(actions) for actions in program],
        homes,
        len(homes) // len(program),
    )


def _whole(costs: Costs) -> Costs:
    """The costs of backwards that are not split: all is done, and freed, in the input gradient."""
    backward = tuple(map(add, costs.input_grad, costs.weight_grad))
    nothing = (0,) * len(backward)
    return costs._replace(input_grad=backward, weight_grad=nothing, deferred=nothing)


def _join(actions: list[Action]) -> list[Action]:
    backward = {Op.FORWARD: Op.FORWARD, Op.INPUT_GRAD: Op.BACKWARD}
    return [a._replace(op=backward[a.op]) for a in actions if a.op in backward]


def paced(
    costs: Costs, homes: list[int], num_microbatches: int, stretch: Stretch, limit: float
) -> Schedule:
    """Make the order of one rhythm, as fast as the busiest rank; ``limit`` must be enough."""
    period = shortest_period(costs, homes)
    block = building_block(costs, homes, period, stretch)
    assert block is not None, "the rhythm has no room for all of a microbatch"
    run = Filling(costs, homes, repeat(block, homes, period, num_microbatches), limit, 0.0)
    assert run.is_whole, f"a rhythm of {stretch} keeps more than {limit} bytes"
    return Schedule(run.program, homes, len(homes) // len(run.program))


def least_bytes(costs: Costs, homes: list[int], split: bool = True) -> int:
    """The bytes that some rank has to keep whatever the order: those of one microbatch."""
    costs = costs if split else _whole(costs)
    orders = one_at_a_time(homes, 1)
    enough = int(Filling(costs, homes, orders, inf, 0.0).peak)
    return bisect_left(
        range(enough), True, key=lambda limit: Filling(costs, homes, orders, limit, 0.0).is_whole
    )


def _orders(costs: Costs, homes: list[int], num_microbatches: int) -> Iterator[Orders]:
    shortest = shortest_period(costs, homes)
    seen: list[Orders] = []
    for stretch in _STRETCHES:
        for slower in _SLOWER:
            block = building_block(costs, homes, slower * shortest, stretch)
            orders = repeat(block or [], homes, slower * shortest, num_microbatches)
            if block and orders not in seen:
                seen.append(orders)
                yield orders
    yield one_at_a_time(homes, num_microbatches)


def _lean(run: Filling) -> Filling:
    """The same orders with weight gradients sooner, where that takes no longer."""

    def fill(part: int) -> Filling:
        limit = run.peak * part / _PARTS
        return Filling(run.costs, run.homes, run.orders, limit, run.patience)

    def is_as_good(part: int) -> bool:
        lean = fill(part)
        return lean.is_whole and lean.makespan <= run.makespan * (1 + 1e-9)

    part = bisect_left(range(_PARTS), True, key=is_as_good)
    return fill(part) if part < _PARTS else run
