"""Axes over some of the ranks of an axis: pipeline ranks that share something, shards of dp."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
            mine = _group(topology, topology.pp, members, timeout) or mine
    return mine


def open_shards(topology: Topology, size: int | None, timeout: float) -> tuple[Axis, Axis]:
    """The dp ranks that share something out, and those that have the same part of it.

    ``size`` neighbours share (a node's, for example), None for all. Collective over the world, once
    for each size for all that use the topology; what is sent on either counts as sent on ``dp``.
    """
    dp = topology.dp
    if size in (None, dp.size):
        return dp, Axis.single(dp.name)
    assert size is not None
    if size == 1:
        return Axis.single(dp.name), dp
    if ("shards", size) not in topology.lines:
        starts = range(0, dp.size, size)
        topology.lines["shards", size] = _open_dp(
            topology, [range(start, start + size) for start in starts], timeout
        )
        topology.lines["replicas", size] = _open_dp(
            topology, [range(first, dp.size, size) for first in range(size)], timeout
        )
    shards, replicas = topology.lines["shards", size], topology.lines["replicas", size]
    assert shards is not None and replicas is not None
    return shards, replicas


def _open_dp(topology: Topology, parts: Sequence[range], timeout: float) -> Axis:
    grid, mine = topology.grid, None
    for pp in range(grid.pp):
        for tp in range(grid.tp):
            for part in parts:
                members = tuple(grid.rank(pp, dp, tp) for dp in part)
                mine = _group(topology, topology.dp, members, timeout) or mine
    assert mine is not None
    return mine


def _group(topology: Topology, of: Axis, members: Ranks, timeout: float) -> Axis | None:
    """The axis over some ranks of a whole one, on those; every rank must ask for it."""
    group = dist.new_group(list(members), timeout=timedelta(seconds=timeout + MARGIN))
    if topology.rank not in members:
        return None
    at = members.index(topology.rank)
    return Axis(of.name, len(members), at, members, group, of.observers)
