from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallel3d import Grid, Topology
from parallel3d.comm.collectives import broadcast, start_broadcast
from parallel3d.comm.ledger import Ledger
from parallel3d.comm.lines import open_lines
from tests.world import run_on

GRID = Grid(pp=3, dp=2)


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def speak(topology: Topology) -> Any:
    """What the source of each line's ends gives, and the bytes that count on pp."""
    before = groups()
    with Topology.init(GRID.pp, GRID.dp, GRID.tp) as mine:  # beside the world's own
        axes = open_lines(mine, [(0, 2), (0, 1, 2), (1,), (0, 2)], 60.0)
        assert open_lines(mine, [(0, 2)], 60.0).get((0, 2)) is axes.get((0, 2))
        assert axes[0, 1, 2] is mine.pp
        assert ((1,) in axes) == (mine.pp.rank == 1)
        ledger, value = Ledger(), torch.full((5,), float(mine.rank))
        ledger.attach(mine.pp)
        ends = axes.get((0, 2))
        if ends is not None:
            assert ends.name == "pp" and ends.ranks[ends.rank] == mine.rank
            pending = start_broadcast(value, ends, 1)
            assert pending.wait() is value and pending.is_over
        else:
            broadcast(value, axes[1,])
        found = value.tolist(), ledger.bytes().get("pp", 0)
    assert ends is None or ends.group is None
    assert groups() == before
    return found


def test_a_line_is_spoken_on_by_its_ranks_alone_and_closes_with_the_topology() -> None:
    for rank, (values, sent) in enumerate(run_on(GRID, speak)):
        pp, dp, tp = GRID.coordinates(rank)
        source = rank if pp == 1 else GRID.rank(2, dp, tp)
        assert values == [float(source)] * 5
        assert sent == (5 * 4 if pp == 2 else 0)
