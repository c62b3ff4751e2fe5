"""``auto``: the fastest schedule on paper, of all with a name and of those made for the costs."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import inf
from typing import NamedTuple

from parallel3d.pipeline.actions import Schedule
from parallel3d.pipeline.costs import Costs, UnitCosts, stage_costs
from parallel3d.pipeline.cut import Cuts
from parallel3d.pipeline.greedy import greedy, least_bytes
from parallel3d.pipeline.memory import most_saved
from parallel3d.pipeline.partition import cuts_within, partition
from parallel3d.pipeline.schedules import build, stage_rank
from parallel3d.pipeline.simulate import Timeline, simulate_costs

Make = Callable[[int], Schedule]  # of so many microbatches

# The simplest first: it is taken where no later one is faster. With the chunks to try.
_NAMED = {
    "1f1b": [1],
    "gpipe": [1],
    "interleaved": [2, 3, 4],
    "looped-bfs": [2, 3, 4],
    "zb-h1": [1],
    "zbv": [2],
    "v-half": [2],
    "v-min": [2],
}
_MADE = [("greedy", "loop", 1), ("greedy-v", "v", 2)]


class Choice(NamedTuple):
    """A schedule, the cut that it was chosen with, and what they cost on paper.

    ``make`` gives the schedule for any number of microbatches; ``timeline`` is for the number that
    was asked for. ``greedy`` and ``greedy-v`` are made for the costs (see ``greedy``), on a loop
    and on a V of two chunks; in ``greedy-whole`` and ``greedy-v-whole`` no backward is split.
    """

    name: str
    make: Make
    cuts: Cuts
    costs: Costs
    timeline: Timeline

    @property
    def peak_bytes(self) -> float:
        """The most bytes that any rank keeps."""
        return max(self.timeline.peak_bytes)


def choose(
    units: Sequence[UnitCosts],
    num_ranks: int,
    num_microbatches: int,
    *,
    comm: float = 0.0,
    memory_limit: float | None = None,
    num_chunks: int | None = None,
    weights: Sequence[float] | None = None,
    method: str | Sequence[int] = "measure",
) -> Choice:
    """Take the fastest schedule that keeps no more than ``memory_limit`` bytes on any rank.

    Candidates are every named schedule, with up to four chunks where it has a choice, and the
    heuristic, its backwards split and whole; each with the most even cut of ``units`` for its
    chunks, and where that keeps too much with the most even cut that does not. Of those that take
    as long the simplest is taken, so that ranks with the same costs agree. ``comm`` is the time of
    one message; ``num_chunks`` admits only what has so many. The cuts make ``weights`` even, by
    default the units' times, in the way of ``partition``; a list of cuts admits only what has that
    many stages.

    Raises ValueError if there are fewer units than stages, and if nothing is within the limit: then
    it tells the least found.
    """
    if weights is None:
        weights = [unit.forward + unit.input_grad + unit.weight_grad for unit in units]
    search = _Search(units, num_ranks, num_microbatches, comm, memory_limit, weights, method)
    best: Choice | None = None
    least = inf
    for choice in search.candidates(num_chunks):
        if isinstance(choice, Choice):
            faster = best is None or choice.timeline.makespan < best.timeline.makespan * (1 - 1e-9)
            if search.fits(choice) and faster:
                best = choice
            least = min(least, choice.peak_bytes)
        else:
            least = min(least, choice)
    if best is None:
        raise ValueError(
            f"pipeline.memory_limit = {memory_limit:g}: a rank has to keep {least:g} bytes in the"
            " least of all schedules that were tried: raise the limit to that, make microbatches"
            " smaller (pipeline.num_microbatches), or keep less of each (recompute.mode)"
        )
    return best


class _Search(NamedTuple):
    units: Sequence[UnitCosts]
    num_ranks: int
    num_microbatches: int
    comm: float
    limit: float | None
    weights: Sequence[float]
    method: str | Sequence[int]

    def fits(self, choice: Choice) -> bool:
        return self.limit is None or choice.peak_bytes <= self.limit

    def candidates(self, num_chunks: int | None) -> Iterator[Choice | int]:
        """All that there is; instead of what can only exceed the limit, the least that it keeps."""
        if num_chunks is not None and num_chunks < 1:
            raise ValueError(f"pipeline.num_chunks = {num_chunks}: a rank has 1 chunk or more")
        if not isinstance(self.method, str):
            num_chunks = num_chunks or max(1, (len(self.method) + 1) // self.num_ranks)
            partition(self.weights, self.num_ranks * num_chunks, self.method)  # refuses wrong cuts
        partition([1] * len(self.units), self.num_ranks * (num_chunks or 1))  # refuses too few
        for name, chunks in _NAMED.items():
            for v in self._chunks(chunks, num_chunks):
                yield from self._named(name, v)
        for name, style, v in _MADE:
            if v in self._chunks([v], num_chunks):
                yield from self._made(name, style, v, split=True)
                yield from self._made(f"{name}-whole", style, v, split=False)

    def _chunks(self, chunks: list[int], asked: int | None) -> list[int]:
        if asked is not None:
            any_number = len(chunks) > 1 and asked > 1
            chunks = [asked] if asked in chunks or any_number else []
        stages = {v: v * self.num_ranks for v in chunks}
        if not isinstance(self.method, str):
            return [v for v in chunks if stages[v] == len(self.method) + 1]
        return [v for v in chunks if stages[v] <= len(self.units)]

    def _named(self, name: str, v: int) -> Iterator[Choice]:
        make = partial(build, name, self.num_ranks, num_chunks=v)
        schedule = make(self.num_microbatches)
        for cuts in self._cuts(v, most_saved(schedule.program), schedule.rank_of_stage):
            choice = self._choice(name, make, schedule, cuts)
            yield choice
            if self.fits(choice):
                return

    def _made(self, name: str, style: str, v: int, split: bool) -> Iterator[Choice | int]:
        homes = [stage_rank(s, self.num_ranks, style) for s in range(v * self.num_ranks)]
        for cuts in self._cuts(v, [1] * len(homes), homes):
            costs = stage_costs(self.units, cuts, self.comm)
            least = least_bytes(costs, homes, split)
            if self.limit is None or least <= self.limit:
                # Made by a search, so that it is made once for each number of microbatches.
                make = cache(partial(greedy, costs, homes, memory_limit=self.limit, split=split))
                yield self._choice(name, make, make(self.num_microbatches), cuts)
                return
            yield least

    def _cuts(self, v: int, in_flight: list[int], homes: list[int]) -> Iterator[Cuts]:
        """The most even cut, then that within the limit, if there is one."""
        saved = [unit.saved for unit in self.units]
        return cuts_within(self.weights, homes, self.method, saved, [in_flight], self.limit)

    def _choice(self, name: str, make: Make, schedule: Schedule, cuts: Cuts) -> Choice:
        costs = stage_costs(self.units, cuts, self.comm)
        return Choice(name, make, cuts, costs, simulate_costs(schedule.program, costs))
