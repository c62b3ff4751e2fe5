"""Cut a model's units into stages: consecutive, none empty, the heaviest as light as possible."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf
from typing import NamedTuple

from parallel3d.pipeline.cut import Cuts, Pieces

METHODS = ("uniform", "parameters", "flops", "measure")


def partition(
    costs: Sequence[float],
    num_stages: int,
    method: str | Sequence[int] = "parameters",
    *,
    memory: Sequence[float] | None = None,
    in_flight: Sequence[float] | None = None,
    rank_of_stage: Sequence[int] | None = None,
    limit: float | None = None,
) -> Cuts:
    """Return ``(start, stop)`` of each stage's units; together they are all units, in order.

    ``costs[u]`` is what unit ``u`` costs: by ``method`` its number of parameters, its FLOPs, or its
    measured time; a unit of cost 0 is weightless. ``parameters``, ``flops`` and ``measure`` make
    the largest sum of costs as small as it can be, and take the most even of those cuts;
    ``uniform`` does so with every weighted unit costing the same. All give each stage a weighted
    unit if there are enough, and keep a weightless unit with the weighted one before it. A list is
    the cuts themselves: the first unit of each stage but stage 0.

    With a ``limit``, the stages of one rank keep no more than that many bytes together, if unit
    ``u`` saves ``memory[u]`` bytes of a microbatch and stage ``s`` keeps ``in_flight[s]``
    microbatches (1 by default). Of such cuts it is the best where each stage has a rank of its own,
    the default of ``rank_of_stage``; else the better of two ways to share out a rank's limit.

    Raises ValueError if there are fewer units than stages, for an unknown method, for cuts that
    leave a stage without units, and if no cut is within the limit.

    >>> partition([1] * 7, 3)
    [(0, 3), (3, 5), (5, 7)]
    >>> partition([1] * 7, 3, memory=[1] * 7, in_flight=[3, 2, 1], limit=6)
    [(0, 2), (2, 4), (4, 7)]
    """
    if num_stages < 1:
        raise ValueError(f"{num_stages} stages: a model is cut into 1 or more")
    if len(costs) < num_stages:
        raise ValueError(
            f"the model has {len(costs)} units, too few for {num_stages} stages (topology.pp *"
            " pipeline.num_chunks): lower one of these, or make a model of more units"
        )
    if not isinstance(method, str):
        if not all(isinstance(cut, int) for cut in method):
            raise ValueError(f"pipeline.partition = {list(method)}: cuts are numbers of units")
        return _explicit(len(costs), num_stages, list(method))
    if method not in METHODS:
        raise ValueError(
            f"pipeline.partition = {method!r} is not a way to cut: choose one of"
            f" {', '.join(METHODS)}, or give the list of cuts"
        )
    if any(cost < 0 for cost in costs):
        raise ValueError(f"a unit costs {min(costs)}: costs are 0 or more")
    if method == "uniform":
        costs = [float(cost > 0) for cost in costs]
    pieces = Pieces.of(costs, [0.0] * len(costs) if memory is None else memory, num_stages)
    free = pieces.balanced([inf] * num_stages)
    assert free is not None
    if limit is None:
        return free
    kept = [1.0] * num_stages if in_flight is None else in_flight
    homes = range(num_stages) if rank_of_stage is None else rank_of_stage
    return _within(_Limit(limit, kept, homes), pieces, free)


def cuts_within(
    costs: Sequence[float],
    rank_of_stage: Sequence[int],
    method: str | Sequence[int],
    memory: Sequence[float],
    in_flight: Sequence[Sequence[float]],
    limit: float | None,
) -> Iterator[Cuts]:
    """The most even cut, then with a limit those that keep it by each of several counts.

    What a rank really keeps depends on more than one count: who asks takes the first cut whose
    simulated peak is within the limit.
    """
    yield partition(costs, len(rank_of_stage), method)
    for counts in in_flight if limit is not None else ():
        with suppress(ValueError):
            yield partition(
                costs,
                len(rank_of_stage),
                method,
                memory=memory,
                in_flight=counts,
                rank_of_stage=rank_of_stage,
                limit=limit,
            )


def _explicit(num_units: int, num_stages: int, cuts: list[int]) -> Cuts:
    bounds = [0, *cuts, num_units]
    if len(cuts) != num_stages - 1 or any(stop <= start for start, stop in pairwise(bounds)):
        raise ValueError(
            f"pipeline.partition = {cuts} for {num_stages} stages of {num_units} units: give"
            f" {num_stages - 1} ascending numbers from 1 to {num_units - 1}, the first unit of each"
            " stage but stage 0"
        )
    return list(pairwise(bounds))


class _Limit(NamedTuple):
    """How many bytes a rank may keep, and how many microbatches each stage keeps on which rank."""

    limit: float
    kept: Sequence[float]
    rank_of_stage: Sequence[int]

    def totals(self, values: Sequence[float]) -> list[float]:
        """For each stage the sum over all stages of its rank."""
        sums = dict.fromkeys(self.rank_of_stage, 0.0)
        for rank, value in zip(self.rank_of_stage, values, strict=True):
            sums[rank] += value
        return [sums[rank] for rank in self.rank_of_stage]

    def rooms(self, shares: Sequence[float]) -> list[float]:
        """The bytes that each stage may save of a microbatch, the limit divided by ``shares``."""
        stages = zip(shares, self.totals(shares), self.kept, strict=True)
        return [self.limit * share / total / kept if kept else inf for share, total, kept in stages]


def _within(limit: _Limit, pieces: Pieces, free: Cuts) -> Cuts:
    """The best cut within a limit; ``free`` is the best without.

    A rank's limit is divided among its stages by the microbatches that they keep, or by the bytes
    that they keep in the free cut: the better one counts.
    """
    used = [kept * saved for kept, saved in zip(limit.kept, pieces.saves(free), strict=True)]
    if max(limit.totals(used)) <= limit.limit:
        return free
    shares = [limit.kept, used] if min(used) > 0 else [limit.kept]
    found = filter(None, (pieces.balanced(limit.rooms(share)) for share in shares))
    best = min(found, key=pieces.unevenness, default=None)
    if best is None:
        least = pieces.leanest(limit.totals(limit.kept))
        raise ValueError(
            f"pipeline.memory_limit = {limit.limit:g} bytes of activations a rank, but no cut of"
            f" the model keeps less than {least:g}: raise the limit, or take more ranks, smaller"
            " microbatches, recompute, or a schedule that keeps fewer microbatches"
        )
    return best
