"""The pipeline of a run: its schedule, how the units are cut into stages, and what those cost."""

from __future__ import annotations

from math import inf
from pathlib import PurePath
from typing import NamedTuple

import torch

from ..pipeline.auto import choose
from ..pipeline.costs import Costs, stage_costs
from ..pipeline.memory import in_flight, most_saved
from ..pipeline.partition import cuts_within, partition
from ..pipeline.schedules import NAMES
from ..pipeline.simulate import simulate_costs
from ..pipeline.stage import Unit
from ..topology import Topology
from .flats import reduces_each
from .measure import Measured, count_flops, measure
from .model import Facts
from .options import Options
from .programs import Programs, Source, chosen, given, named


class Plan(NamedTuple):
    """``costs`` are those of the stages, in ``unit``; None where nothing was measured."""

    programs: Programs
    cuts: list[tuple[int, int]]
    costs: Costs | None = None
    unit: str = "seconds"


class Known(NamedTuple):
    """What was found out about the units: times, and FLOPs in the place of times."""

    timed: Measured | None = None
    counted: Measured | None = None


def make_plan(
    units: list[Unit], facts: dict[str, Facts], topology: Topology, options: Options
) -> Plan:
    """The same on every rank. Raises ValueError for a schedule or a cut that cannot be.

    Units are measured where what they cost chooses the schedule (``auto``) or the cut
    (``measure``), and where there is a limit of memory to keep; for ``flops``, and to tell what a
    sample costs, they are counted. Both are collective.
    """
    if options.schedule == "auto":
        known = _look(units, topology, options)
        return _chosen(_weights(units, facts, options, known), known, topology, options)
    each = reduces_each(topology, options)
    programs = Programs(_source(options, topology.pp.size, each), topology.pp, each)
    num_stages, limit = programs.num_stages, options.memory_limit
    even = "uniform" if isinstance(options.partition, str) else options.partition
    partition([1.0] * len(units), num_stages, even)  # refused before anything is measured
    decides = num_stages > 1 or limit is not None
    known = _look(units, topology, options, programs.splits_backward) if decides else Known()
    weights = _weights(units, facts, options, known)
    found = known.timed or known.counted
    if found is not None:
        cuts = _cut(weights, found, programs, options)
    else:
        cuts = partition(weights, num_stages, options.partition)
        found = _told(units, topology, options)
    if found is None:
        return Plan(programs, cuts)
    costs = stage_costs(found.units, cuts, found.comm)
    return Plan(programs, cuts, costs, "seconds" if known.timed else "FLOPs")


def _told(units: list[Unit], topology: Topology, options: Options) -> Measured | None:
    """What a sample costs, for the table of the start alone: None where it cannot be found out."""
    if options.sample is None:
        return None
    try:
        return count_flops(units, topology, options)
    except Exception:  # a unit that cannot run by itself still trains
        return None


def _cut(
    weights: list[float], found: Measured, programs: Programs, options: Options
) -> list[tuple[int, int]]:
    """The most even cut, or with a limit the first that keeps it, from more even to less."""
    program = programs.whole(programs.num_microbatches)
    limit = options.memory_limit
    least = inf
    for cuts in cuts_within(
        weights,
        programs.rank_of_stage,
        options.partition,
        [cost.saved for cost in found.units],
        [most_saved(program), in_flight(program)],
        limit,
    ):
        peak = max(simulate_costs(program, stage_costs(found.units, cuts, found.comm)).peak_bytes)
        if limit is None or peak <= limit:
            return cuts
        least = min(least, peak)
    raise ValueError(
        f"pipeline.memory_limit = {limit:.0f}, but the activations of one rank take {least:.0f} "
        f"bytes in the least of the cuts that were tried: raise it, or take recompute.mode=full, "
        f"pipeline.schedule=auto or more microbatches of a smaller size"
    )


def _chosen(weights: list[float], known: Known, topology: Topology, options: Options) -> Plan:
    """The fastest of all schedules, by what the units cost."""
    assert known.timed is not None
    choice = choose(
        known.timed.units,
        topology.pp.size,
        options.num_microbatches,
        comm=known.timed.comm,
        memory_limit=options.memory_limit,
        num_chunks=options.num_chunks,
        weights=weights,
        method=options.partition,
    )
    source = chosen(choice, options.num_microbatches)
    programs = Programs(source, topology.pp, reduces_each(topology, options))
    return Plan(programs, choice.cuts, choice.costs)


def _source(options: Options, num_ranks: int, each: bool) -> Source:
    asked, sizes = options.schedule, (num_ranks, options.num_microbatches, options.num_chunks)
    if isinstance(asked, str) and (asked in NAMES or not PurePath(asked).suffix):
        return named(asked, *sizes)
    return given(asked, *sizes, each)


def _look(units: list[Unit], topology: Topology, options: Options, split: bool = True) -> Known:
    """Measure and count what the options need to know."""
    reason = reason_to_look(options.schedule, options.partition, options.memory_limit)
    if reason is None:
        return Known()
    if options.sample is None:
        raise ValueError(
            f"{reason} looks at what the units do, for which it needs one microbatch: pass "
            f"sample=(x, target)"
        )
    is_counted = options.partition == "flops"
    is_timed = not is_counted or options.schedule == "auto" or options.memory_limit is not None
    return Known(
        measure(units, topology, options, split) if is_timed else None,
        count_flops(units, topology, options) if is_counted else None,
    )


def reason_to_look(schedule: object, partition: object, memory_limit: float | None) -> str | None:
    """The argument, if any, for which units are measured or counted: it needs a sample."""
    if schedule == "auto":
        return f"schedule = {schedule!r}"
    if partition in ("measure", "flops"):
        return f"partition = {partition!r}"
    return None if memory_limit is None else f"memory_limit = {memory_limit}"


def _weights(
    units: list[Unit], facts: dict[str, Facts], options: Options, known: Known
) -> list[float]:
    """What the cut makes even: seconds, FLOPs, or parameters of the whole model."""
    by = {"measure": known.timed, "flops": known.counted}
    found = by.get(options.partition) if isinstance(options.partition, str) else None
    if found is not None:
        return [sum(cost[:3]) for cost in found.units]
    costs = [0.0] * len(units)
    for fact in facts.values():  # a tied parameter at each of its uses
        costs[fact.unit] += torch.Size(fact.shape).numel()
    return costs
