"""The pipeline of a run: its schedule, how the units are cut into stages, and what those cost."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..pipeline.costs import Costs
from ..pipeline.partition import partition
from ..pipeline.stage import Unit
from ..topology import Topology
from .model import Facts
from .options import Options
from .programs import Programs, named


class Plan(NamedTuple):
    """``costs`` are those of the stages, None where nothing was measured or counted."""

    programs: Programs
    cuts: list[tuple[int, int]]
    costs: Costs | None = None


def make_plan(
    units: list[Unit], facts: dict[str, Facts], topology: Topology, options: Options
) -> Plan:
    """The same on every rank. Raises ValueError for a schedule or a cut that cannot be."""
    source = named(options.schedule, topology.pp.size, options.num_microbatches, options.num_chunks)
    programs = Programs(source, topology.pp)
    cuts = partition(_parameters(units, facts), programs.num_stages, options.partition)
    return Plan(programs, cuts)


def _parameters(units: list[Unit], facts: dict[str, Facts]) -> list[float]:
    """Of each unit in the whole model, a tied one at each of its uses."""
    costs = [0.0] * len(units)
    for fact in facts.values():
        costs[fact.unit] += torch.Size(fact.shape).numel()
    return costs
