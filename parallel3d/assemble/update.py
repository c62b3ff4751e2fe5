"""The optimizer of a rank's shards, on the device, or in the host's memory, or on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from ..checkpoint.agree import agree
from ..optim.bundle import Options as Group
from ..optim.narrow import check_narrow
from ..optim.optimizer import Apart, ShardedOptimizer
from ..optim.probe import check_elementwise
from ..topology import Axis, Topology
from ..zero.disk import DiskStore
from ..zero.parameters import keep_on_host
from ..zero.shards import Shards
from ..zero.store import Store
from ..zero.updates import HostUpdates
from .options import Offload, Options

STATE_DTYPES = {None: None, "bf16": torch.bfloat16}


def check_optimizer(options: Options, groups: Sequence[Group], device: torch.device) -> None:
    """Refuse an optimizer that cannot do what it is asked here. Nothing is sent."""
    where = device if options.offload.optimizer == "none" else torch.device("cpu")
    check_elementwise(options.optimizer, groups, where)
    if options.state_dtype not in STATE_DTYPES:
        raise ValueError(f"state_dtype = {options.state_dtype!r} is not one of None, bf16")
    if options.state_dtype is not None:
        check_narrow(options.optimizer, groups, where)


def make_optimizer(
    shards: Shards, groups: Sequence[Group], topology: Topology, options: Options, host: Axis
) -> ShardedOptimizer:
    """Over what of the shards is updated here; copies are counted on ``host``. Collective.

    Raises OSError or RuntimeError, on every rank, where a rank's disk cannot take its state.
    """

    def make() -> ShardedOptimizer:
        apart = _apart(shards, topology, options, host)
        made = (options.optimizer, shards.trained(), groups, options.lr_schedule)
        optimizer = ShardedOptimizer(*made, apart)
        if options.offload.parameters == "cpu":
            store = Store(pinned=topology.device.type == "cuda")
            keep_on_host(shards.held_by_unit(), store, host)
        return optimizer

    if options.offload.optimizer != "disk":
        return make()
    return agree(topology.world, make)


def _apart(shards: Shards, topology: Topology, options: Options, host: Axis) -> Apart | None:
    dtype = STATE_DTYPES[options.state_dtype]
    store = _store(options.offload, topology)
    flats = {
        unit: [flat for flat in shards.flats[unit] if flat.of is None]
        for unit in sorted(shards.flats)
    }
    flats = {unit: mine for unit, mine in flats.items() if mine}
    if store is None:
        return None if dtype is None else Apart(flats, dtype)
    shards.host = HostUpdates(flats, store, host, topology.device)
    return Apart(flats, dtype, shards.host)


def _store(offload: Offload, topology: Topology) -> Store | None:
    if offload.optimizer == "cpu":
        return Store(pinned=topology.device.type == "cuda")
    if offload.optimizer == "disk":
        assert offload.path is not None
        return DiskStore(Path(offload.path), topology.rank)
    return None
