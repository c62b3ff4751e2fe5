"""The flat buffers of a rank's units, and the optimizer groups that order them inside."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn

from ..comm.lines import open_shards
from ..optim.make import Options as Group
from ..pipeline.stage import Unit
from ..topology import Axis, Topology
from ..zero.flat import Flat, Held
from .model import DTYPES, Facts
from .options import Options


@dataclass(frozen=True)
class Sharding:
    """What is sharded over which ranks: ``stage`` is that of ZeRO, as far as there is a choice."""

    stage: int
    each: bool
    axis: Axis
    replicas: Axis
    device: torch.device

    @classmethod
    def open(cls, topology: Topology, options: Options) -> Sharding:
        """The axes of a run. Collective over the world, once for each size of a shard.

        A rank that shares with nobody owns everything: there is nothing to gather or to free.
        """
        axis, replicas = open_shards(topology, options.shard_size, options.timeout)
        stage, each = _stage(topology, options), reduces_each(topology, options)
        return cls(stage, each, axis, replicas, topology.device)

    def flat(
        self,
        held: list[Held],
        dtype: torch.dtype,
        *,
        trained: bool = True,
        of: Flat | None = None,
        copy: bool = False,
    ) -> Flat:
        """A flat buffer of these parameters."""
        return Flat(
            held,
            self.axis,
            self.device,
            dtype=dtype,
            stage=self.stage,
            replicas=self.replicas.size,
            trained=trained,
            of=of,
            copy=copy,
        )


def reduces_each(topology: Topology, options: Options) -> bool:
    """Whether gradients are reduced in each microbatch, and not once a step."""
    return _stage(topology, options) >= 2 and options.zero_reduce == "each"


def _stage(topology: Topology, options: Options) -> int:
    # A rank alone shares nothing out, but parameters that leave the device come back by gathers.
    shares = (options.shard_size or topology.dp.size) > 1 or options.offload.parameters != "none"
    return options.zero if shares else min(options.zero, 1)


def groups_of(
    units: list[Unit], facts: dict[str, Facts], choose: Callable[[str, nn.Parameter], Group] | None
) -> tuple[list[Group], dict[str, int]]:
    """Optimizer groups of the whole model, and each owner's group; the same on every rank."""
    groups: list[Group] = []
    group_of: dict[str, int] = {}
    for unit in units:
        for path, parameter in unit.module.named_parameters(remove_duplicate=False):
            fact = facts[f"{unit.name}.{path}"]
            if fact.name == fact.owner and fact.trained:
                options = choose(fact.name, parameter) if choose else {}
                if options not in groups:
                    groups.append(options)
                group_of[fact.name] = groups.index(options)
    return groups, group_of


def flats_of(
    units: list[Unit],
    facts: dict[str, Facts],
    group_of: dict[str, int],
    tied: Collection[str],
    sharding: Sharding,
    precision: str,
) -> dict[int, list[Flat]]:
    """Of this rank's units: one per dtype, and one for each use of each of the ``tied`` owners.

    So the borders of a tied parameter's shards are the same on every rank that holds it.
    """
    first: dict[str, Flat] = {}
    flats: dict[int, list[Flat]] = {}
    for unit in units:
        buckets: dict[tuple[str, torch.dtype], list[Held]] = {}
        for path, parameter in unit.module.named_parameters():
            fact = facts[f"{unit.name}.{path}"]
            if parameter.requires_grad:
                held = Held(fact.name, parameter, fact.placement, fact.index, group_of[fact.owner])
                floats = parameter.is_floating_point()
                dtype = DTYPES[precision] if floats else parameter.dtype
                use = fact.owner if fact.owner in tied else ""
                buckets.setdefault((use, dtype), []).append(held)
        for (use, dtype), bucket in buckets.items():
            copy = use != "" and use not in first and bucket[0].name != use
            flat = sharding.flat(bucket, dtype, of=first.get(use), copy=copy)
            if use:
                first.setdefault(use, flat)
            flats.setdefault(unit.number, []).append(flat)
    return flats


def kept_of(
    units: list[Unit], facts: dict[str, Facts], sharding: Sharding
) -> dict[int, list[Flat]]:
    """Of frozen parameters, where values are sharded: one per dtype, of the first unit here."""
    kept: dict[int, list[Flat]] = {}
    seen: set[nn.Parameter] = set()
    for unit in units if sharding.stage == 3 else ():
        buckets: dict[torch.dtype, list[Held]] = {}
        for path, parameter in unit.module.named_parameters():
            if parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            fact = facts[f"{unit.name}.{path}"]
            held = Held(fact.name, parameter, fact.placement, fact.index, 0)
            buckets.setdefault(parameter.dtype, []).append(held)
        for dtype, bucket in buckets.items():
            kept.setdefault(unit.number, []).append(sharding.flat(bucket, dtype, trained=False))
    return kept


def frozen_of(units: list[Unit]) -> dict[int, list[tuple[str, nn.Parameter]]]:
    """Parameters by unit and full name that are not trained."""
    return {
        unit.number: [
            (f"{unit.name}.{path}", parameter)
            for path, parameter in unit.module.named_parameters()
            if not parameter.requires_grad
        ]
        for unit in units
    }
