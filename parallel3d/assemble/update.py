"""The optimizer of a rank's shards, on the device, or in the host's memory, or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..checkpoint.agree import agree
from ..optim.make import Options as Group
from ..optim.narrow import check_narrow
from ..optim.optimizer import Apart, ShardedOptimizer
from ..optim.probe import check_elementwise
from ..optim.rules import rule_of
from ..optim.whole import Rule, WholeOptimizer, options_of
from ..topology import Axis, Topology
from ..zero.disk import DiskStore
from ..zero.parameters import keep_on_host
from ..zero.shards import Shards
from ..zero.store import Store
from ..zero.updates import HostUpdates
from .model import Facts
from .options import Offload, Options

STATE_DTYPES = {None: None, "bf16": torch.bfloat16}


def check_optimizer(
    options: Options,
    groups: Sequence[Group],
    group_of: Mapping[str, int],
    facts: Mapping[str, Facts],
    device: torch.device,
) -> Rule | None:
    """Refuse an optimizer that cannot do what it is asked here. Nothing is sent.

    Returns the rule of one that is not elementwise, if there is one; ``group_of`` has each trained
    parameter's group.
    """
    if options.state_dtype not in STATE_DTYPES:
        raise ValueError(f"optim.state_dtype = {options.state_dtype!r} is not one of null, bf16")
    rule = rule_of(options.optimizer, groups)
    if rule is not None:
        _check_rule(rule, options, groups, group_of, facts)
        return rule
    where = device if options.offload.optimizer == "none" else torch.device("cpu")
    check_elementwise(options.optimizer, groups, where)
    if options.state_dtype is not None:
        check_narrow(options.optimizer, groups, where)
    return None


def _check_rule(
    rule: Rule,
    options: Options,
    groups: Sequence[Group],
    group_of: Mapping[str, int],
    facts: Mapping[str, Facts],
) -> None:
    """Refuse what one unit at a time cannot do, and parameters, whichever rank holds them."""
    to, dtype = options.offload.optimizer, options.state_dtype
    for key, value, none in (("offload.optimizer", to, "none"), ("optim.state_dtype", dtype, None)):
        if value != none:
            raise ValueError(
                f"{key} = {value} is for elementwise optimizers, such as torch.optim.AdamW, and "
                f"{rule.name} is not one: leave it {none or 'null'}"
            )
    complete = options_of(options.optimizer, groups)
    for name, group in group_of.items():
        rule.check(name, facts[name].shape, complete[group])


def make_optimizer(
    rule: Rule | None,
    shards: Shards,
    groups: Sequence[Group],
    topology: Topology,
    options: Options,
    host: Axis,
) -> ShardedOptimizer | WholeOptimizer:
    """Over what of the shards is updated here; copies are counted on ``host``. Collective.

    Raises OSError or RuntimeError, on every rank, where a rank's disk cannot take its state.
    """

    def over_shards() -> ShardedOptimizer | WholeOptimizer:
        trained, curve = shards.trained(), options.lr_schedule
        if rule is not None:
            complete = options_of(options.optimizer, groups)
            return WholeOptimizer(rule, trained, complete, topology.tp, curve)
        dtype, store = STATE_DTYPES[options.state_dtype], _store(options.offload, topology)
        units = shards.trained_by_unit()
        if store is not None:
            shards.host = HostUpdates(units, store, host, topology.device)
        apart = Apart(units, dtype, shards.host) if store or dtype else None
        return ShardedOptimizer(options.optimizer, trained, groups, curve, apart)

    agreed = options.offload.optimizer == "disk"
    optimizer = agree(topology.world, over_shards) if agreed else over_shards()
    if options.offload.parameters == "cpu":
        shards.parameter_store = Store(pinned=topology.device.type == "cuda")
        units = shards.held_by_unit()
        keep_on_host(units, shards.parameter_store, host, topology.device)
    return optimizer


def _store(offload: Offload, topology: Topology) -> Store | None:
    if offload.optimizer == "cpu":
        return Store(pinned=topology.device.type == "cuda")
    if offload.optimizer == "disk":
        assert offload.path is not None
        return DiskStore(Path(offload.path), topology.rank)
    return None
