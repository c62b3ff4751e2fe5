"""Cut a model's units into stages: consecutive, none empty, the heaviest as light as possible."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf

METHODS = ("uniform", "parameters")
_NOT_YET = ("flops", "measure")


def partition(
    costs: Sequence[float], num_stages: int, method: str | Sequence[int] = "parameters"
) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` of each stage's units; together they are all units, in order.

    ``costs[u]`` is what unit ``u`` costs, for instance its number of parameters; a unit of cost 0
    is weightless. ``parameters`` makes the largest sum of costs as small as it can be, and takes
    the most even of those cuts; ``uniform`` does so with every weighted unit costing the same. Both
    give each stage a weighted unit if there are enough, and keep a weightless unit with the
    weighted one before it. A list is the cuts themselves: the first unit of each stage but stage 0.

    Raises ValueError if there are fewer units than stages, for an unknown method, and for cuts that
    leave a stage without units.

    >>> partition([1] * 7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    if num_stages < 1:
        raise ValueError(f"{num_stages} stages: a model is cut into 1 or more")
    if len(costs) < num_stages:
        raise ValueError(
            f"the model has {len(costs)} units, too few for {num_stages} stages (topology.pp *"
            " pipeline.num_chunks): lower one of these, or make a model of more units"
        )
    if not isinstance(method, str):
        return _explicit(len(costs), num_stages, list(method))
    if method not in METHODS:
        problem = "is not built yet" if method in _NOT_YET else "is not a way to cut"
        raise ValueError(
            f"pipeline.partition = {method!r} {problem}: choose one of {', '.join(METHODS)},"
            " or give the list of cuts"
        )
    if any(cost < 0 for cost in costs):
        raise ValueError(f"a unit costs {min(costs)}: costs are 0 or more")
    if method == "uniform":
        costs = [float(cost > 0) for cost in costs]
    return _balanced(costs, num_stages)


def _explicit(num_units: int, num_stages: int, cuts: list[int]) -> list[tuple[int, int]]:
    bounds = [0, *cuts, num_units]
    if len(cuts) != num_stages - 1 or any(stop <= start for start, stop in pairwise(bounds)):
        raise ValueError(
            f"pipeline.partition = {cuts} for {num_stages} stages of {num_units} units: give"
            f" {num_stages - 1} ascending numbers from 1 to {num_units - 1}, the first unit of each"
            " stage but stage 0"
        )
    return list(pairwise(bounds))


def _balanced(costs: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    # A piece is a weighted unit and the weightless ones behind it; the first also has those before.
    starts = [0, *[unit for unit, cost in enumerate(costs) if cost > 0][1:]]
    if len(starts) < num_stages:
        starts = list(range(len(costs)))
    bounds = [*starts, len(costs)]
    pieces = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
    heaviest, _ = _cut(pieces, num_stages, join=max)
    _, ends = _cut(pieces, num_stages, join=lambda squares, cost: squares + cost**2, limit=heaviest)
    return list(pairwise([0, *(bounds[end] for end in ends)]))


def _cut(
    costs: Sequence[float],
    num_parts: int,
    join: Callable[[float, float], float],
    limit: float = inf,
) -> tuple[float, list[int]]:
    """Dynamic programming over (parts, end): the least of ``join`` over the parts, and their ends.

    No part costs more than ``limit``. Among equals the earlier parts are the longer ones.
    """
    sums = [0, *accumulate(costs)]
    best: dict[int, tuple[float, list[int]]] = {0: (0, [])}
    for part in range(1, num_parts + 1):
        longer: dict[int, tuple[float, list[int]]] = {}
        for end in range(part, len(costs) + 1):
            for start in range(end - 1, part - 2, -1):
                cost = sums[end] - sums[start]
                if start not in best or cost > limit:
                    continue
                total = join(best[start][0], cost)
                if end not in longer or total < longer[end][0]:
                    longer[end] = (total, [*best[start][1], end])
        best = longer
    return best[len(costs)]
