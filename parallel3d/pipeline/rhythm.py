"""The way of one microbatch through the stages, repeated in one rhythm by all that follow.

What a rank keeps is the time from a microbatch's forward to its backward over the time between two
microbatches, whatever their number: so a block that leaves no gaps keeps the least, and a stretched
one fills and drains the pipeline with less waiting (Qi et al. 2024, "Pipeline Parallelism with
Controllable Memory", building blocks). Weight gradients wait for nobody and are placed later.
"""

from math import inf
from typing import NamedTuple

from parallel3d.pipeline.costs import Costs


class Beat(NamedTuple):
    """A forward or an input gradient of a stage, and when the first microbatch's starts."""

    start: float
    stage: int
    is_forward: bool


class Due(NamedTuple):
    """A forward or an input gradient of one microbatch."""

    is_forward: bool
    stage: int
    microbatch: int


Orders = list[list[Due]]  # of each rank


class Stretch(NamedTuple):
    """The time from a start to the next stage's, over the duration: to a higher rank, a lower."""

    out: float
    back: float


def shortest_period(costs: Costs, homes: list[int]) -> float:
    """The time that the busiest rank needs for one microbatch; ``homes`` are the stages' ranks."""
    busy = [0.0] * (1 + max(homes))
    for stage, rank in enumerate(homes):
        busy[rank] += costs.forward[stage] + costs.input_grad[stage] + costs.weight_grad[stage]
    return max(busy)


def path(num_stages: int) -> list[tuple[int, bool]]:
    """The (stage, whether forward) of one microbatch, in the order of what needs what."""
    stages = range(num_stages)
    return [(stage, True) for stage in stages] + [(stage, False) for stage in reversed(stages)]


def building_block(
    costs: Costs, homes: list[int], period: float, stretch: Stretch
) -> list[Beat] | None:
    """Start every forward and input gradient as soon as its input, the stretch and the rank allow.

    A rank does one thing at a time, also when the block is repeated every ``period``. None if that
    leaves no place for one of them.
    """
    taken: list[list[tuple[float, float]]] = [[] for _ in range(1 + max(homes))]
    block: list[Beat] = []
    start = length = 0.0
    rank = homes[0]
    for stage, is_forward in path(len(homes)):
        home = homes[stage]
        if home != rank:
            factor = stretch.out if home > rank else stretch.back
            length = max(length + costs.comm, factor * length)
        start, rank = start + length, home
        length = (costs.forward if is_forward else costs.input_grad)[stage]
        start = _place(start, length, taken[rank], period)
        if start == inf:
            return None
        taken[rank].append((start, length))
        block.append(Beat(start, stage, is_forward))
    return block


def _place(start: float, length: float, taken: list[tuple[float, float]], period: float) -> float:
    """The earliest time from ``start`` at which ``length`` meets nothing taken, now or repeated."""
    latest = start + period
    while length and start <= latest:
        wait = max((_overlap(start, length, other, period) for other in taken), default=0.0)
        if not wait:
            break
        start += wait
    return start if start <= latest else inf


def _overlap(start: float, length: float, other: tuple[float, float], period: float) -> float:
    """How long to wait until the repetition of ``other`` that is in the way has ended, or 0."""
    close = 1e-9 * period
    since = (start - other[0]) % period
    if since < other[1] - close:
        return other[1] - since
    if since + length > period + close and other[1]:
        return period - since + other[1]
    return 0.0


def one_at_a_time(homes: list[int], num_microbatches: int) -> Orders:
    """The orders that keep least: a microbatch starts when the one before it is done."""
    orders: Orders = [[] for _ in range(1 + max(homes))]
    for k in range(num_microbatches):
        for stage, is_forward in path(len(homes)):
            orders[homes[stage]].append(Due(is_forward, stage, k))
    return orders


def repeat(block: list[Beat], homes: list[int], period: float, num_microbatches: int) -> Orders:
    """The order of every rank's forwards and input gradients; microbatch k starts k periods late.

    Equal times keep the order of the block, so that the orders of all ranks are cut from one line.
    """
    line = sorted(
        (beat.start + k * period, number, k)
        for number, beat in enumerate(block)
        for k in range(num_microbatches)
    )
    orders: Orders = [[] for _ in range(1 + max(homes))]
    for _, number, k in line:
        _, stage, is_forward = block[number]
        orders[homes[stage]].append(Due(is_forward, stage, k))
    return orders
