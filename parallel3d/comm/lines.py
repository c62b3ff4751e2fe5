"""Axes over some of the ranks of a pipeline line: the ranks that share dp and tp coordinates."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from ..topology import MARGIN, Axis, Topology

Ranks = tuple[int, ...]


def open_lines(topology: Topology, wanted: Iterable[Ranks], timeout: float) -> dict[Ranks, Axis]:
    """The axes of this rank over sets of pipeline ranks, ascending. Collective over the world.

    Every rank must want the same. Each set becomes one group in every pipeline line, once for all
    that use the topology; what is sent there counts as sent on ``pp``. A set of one rank needs no
    group, and that of all ranks is the pipeline axis.
    """
    pp = topology.pp
    axes: dict[Ranks, Axis | None] = {}
    for ranks in sorted(set(wanted)):
        if ranks not in topology.lines and 1 < len(ranks) < pp.size:
            topology.lines[ranks] = _open(topology, ranks, timeout)
        axes[ranks] = topology.lines.get(ranks, pp if len(ranks) > 1 else Axis.single(pp.name))
    return {ranks: axis for ranks, axis in axes.items() if axis is not None and pp.rank in ranks}


def _open(topology: Topology, ranks: Ranks, timeout: float) -> Axis | None:
    grid, mine = topology.grid, None
    for dp in range(grid.dp):
        for tp in range(grid.tp):
            members = tuple(grid.rank(pp, dp, tp) for pp in ranks)
            group = dist.new_group(list(members), timeout=timedelta(seconds=timeout + MARGIN))
            if topology.rank in members:
                at, heard = members.index(topology.rank), topology.pp.observers
                mine = Axis(topology.pp.name, len(ranks), at, members, group, heard)
    return mine
