"""The best of all cuts of a model's units into stages, by dynamic programming."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

Cuts = list[tuple[int, int]]
Score = Callable[[float, int, int, int], float]  # (of the parts before, part, start, end) -> of all


class Pieces(NamedTuple):
    """What a cut does not part: a weighted unit and the weightless ones behind it.

    The first also has those before it. ``bounds`` are the units where the pieces start, and their
    end; ``cost`` and ``saved`` are sums over the units before each bound.
    """

    num_stages: int
    bounds: list[int]
    cost: list[float]
    saved: list[float]

    @classmethod
    def of(cls, costs: Sequence[float], saved: Sequence[float], num_stages: int) -> "Pieces":
        """Join units that cost and save so much; where too few are weighted, each is a piece."""
        starts = [0, *[unit for unit, cost in enumerate(costs) if cost > 0][1:]]
        if len(starts) < num_stages:
            starts = list(range(len(costs)))
        bounds = [*starts, len(costs)]
        cost, bytes_ = ([0, *accumulate(values)] for values in (costs, saved))
        return cls(num_stages, bounds, [cost[at] for at in bounds], [bytes_[at] for at in bounds])

    def saves(self, cuts: Cuts) -> list[float]:
        """The bytes that each stage of a cut saves of a microbatch."""
        before = dict(zip(self.bounds, self.saved, strict=True))
        return [before[stop] - before[start] for start, stop in cuts]

    def unevenness(self, cuts: Cuts) -> tuple[float, float]:
        """The cost of the heaviest stage of a cut, and the sum of squares of all."""
        before = dict(zip(self.bounds, self.cost, strict=True))
        costs = [before[stop] - before[start] for start, stop in cuts]
        return max(costs), sum(cost**2 for cost in costs)

    def balanced(self, rooms: Sequence[float]) -> Cuts | None:
        """The most even of the cuts whose heaviest stage is lightest, of those that fit.

        Stage ``s`` saves at most ``rooms[s]`` bytes of a microbatch; None if no cut does.
        """

        def weigh(part: int, start: int, end: int) -> float:
            fits = self.saved[end] - self.saved[start] <= rooms[part]
            return self.cost[end] - self.cost[start] if fits else inf

        def square(before: float, part: int, start: int, end: int) -> float:
            cost = weigh(part, start, end)
            return before + cost**2 if cost <= heaviest else inf

        heaviest, _ = self.cut(lambda before, *part: max(before, weigh(*part)))
        return self.cut(square)[1] if heaviest < inf else None

    def leanest(self, in_flight: Sequence[float]) -> float:
        """The bytes of the stage that keeps most, in the cut that makes them fewest."""

        def keep(before: float, part: int, start: int, end: int) -> float:
            return max(before, in_flight[part] * (self.saved[end] - self.saved[start]))

        return self.cut(keep)[0]

    def cut(self, score: Score) -> tuple[float, Cuts]:
        """Dynamic programming over (parts, end): the least score of all parts, and its cut.

        A score of infinity forbids a part. Among equals the earlier parts are the longer ones.
        """
        best: dict[int, tuple[float, list[int]]] = {0: (0, [])}
        for part in range(self.num_stages):
            longer: dict[int, tuple[float, list[int]]] = {}
            for end in range(part + 1, len(self.bounds)):
                for start in range(end - 1, part - 1, -1):
                    if start not in best:
                        continue
                    total = score(best[start][0], part, start, end)
                    if total < (longer[end][0] if end in longer else inf):
                        longer[end] = (total, [*best[start][1], end])
            best = longer
        total, ends = best.get(len(self.bounds) - 1, (inf, []))
        return total, list(pairwise([0, *(self.bounds[end] for end in ends)]))
