"""``trace.json``: the newest measured timeline of a run."""

from __future__ import annotations

from pathlib import Path

from ..comm.collectives import gather_objects
from ..pipeline.trace import Lane, Trace, to_json
from ..topology import Topology
from .jsonl import replace
from .recorder import Recording


def write_trace(path: Path, topology: Topology, recording: Recording, about: Trace) -> None:
    """Gather what every rank did in a step; rank 0 writes it, all at once. Collective.

    ``about`` is the trace without its lanes.
    """
    replica = topology.dp.rank * topology.tp.size + topology.tp.rank
    mine = Lane(topology.describe(), topology.pp.rank, replica, *recording)
    lanes = gather_objects(mine, topology.world)
    if topology.rank == 0:
        replace(path, to_json(about._replace(lanes=lanes)).encode())
