"""From the engine's arguments to what its units keep between forward and backward."""

from __future__ import annotations

from ..comm.host import host_axis
from ..pipeline.activations import Activations
from ..pipeline.cut_inputs import CutInputs
from ..pipeline.offload import Host
from ..topology import Axis, Topology
from .options import Options


def activations_of(options: Options, topology: Topology, host: Axis | None = None) -> Activations:
    """As the options say; copies are counted on ``host``."""
    away = options.offload.activations == "cpu"
    return Activations(
        options.recompute,
        options.recompute_every,
        topology.tp,
        CutInputs(topology.tp) if options.recompute_partition else None,
        Host(topology.device, host or host_axis(topology.rank)) if away else None,
    )
