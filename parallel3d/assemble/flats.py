"""The flat buffers of a rank's units, and the optimizer groups that order them inside."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from ..optim.optimizer import Options as Group
from ..pipeline.stage import Unit
from ..topology import Topology
from ..zero.flat import Flat, Held
from .model import DTYPES, Facts
from .options import Options


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
    topology: Topology,
    options: Options,
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
                dtype = DTYPES[options.precision] if floats else parameter.dtype
                use = fact.owner if fact.owner in tied else ""
                buckets.setdefault((use, dtype), []).append(held)
        for (use, dtype), bucket in buckets.items():
            flat = Flat(
                bucket,
                topology.dp,
                topology.device,
                dtype=dtype,
                whole=options.zero == 0,
                of=first.get(use),
                copy=use != "" and use not in first and bucket[0].name != use,
            )
            if use:
                first.setdefault(use, flat)
            flats.setdefault(unit.number, []).append(flat)
    return flats


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
