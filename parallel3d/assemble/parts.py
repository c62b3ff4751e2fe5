"""From the engine's arguments to the parts that it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.ledger import Ledger
from ..comm.p2p import Edge, open_channels
from ..optim.norm import NormSlots
from ..optim.optimizer import Options as Group
from ..optim.optimizer import ShardedOptimizer
from ..optim.probe import check_elementwise
from ..pipeline.border import Border
from ..pipeline.costs import Costs
from ..pipeline.criterion import SumLoss, as_sum, default_num_items
from ..pipeline.runtime import Interpreter
from ..pipeline.stage import Stage, Unit
from ..topology import Topology
from ..zero.flat import Flat, Held
from ..zero.shards import Shards
from .model import (
    DTYPES,
    Facts,
    check_batch_norm,
    check_state,
    check_values,
    facts_of,
    give_values,
    separate_ties,
    units_of,
)
from .options import Options
from .plan import make_plan
from .programs import Programs


@dataclass
class Parts:
    """What the engine runs on this rank. ``facts`` are those of the whole model."""

    topology: Topology
    facts: dict[str, Facts]
    cuts: list[tuple[int, int]]
    costs: Costs | None
    stages: dict[int, Stage]
    interpreter: Interpreter
    programs: Programs
    shards: Shards
    slots: NormSlots
    optimizer: ShardedOptimizer
    criterion: SumLoss
    num_items: Callable[[Any], Tensor | int]
    ledger: Ledger

    @property
    def units(self) -> list[Unit]:
        """This rank's units, in model order."""
        return [unit for index in sorted(self.stages) for unit in self.stages[index].units]


def assemble(model: nn.Module, topology: Topology, options: Options) -> Parts:
    """Cut the model, give it values, and connect the parts. Collective over the world.

    Whatever can be refused is refused on every rank before anything is sent.
    """
    units = units_of(model)
    check_batch_norm(units, topology.dp.size, options.num_microbatches)
    check_state(units)
    check_values(units, options.precision, options.init is not None)
    loss_fn = as_sum(options.loss_fn)
    num_items = options.num_items or default_num_items(options.loss_fn)
    facts = facts_of(units)
    programs, cuts, costs = make_plan(units, facts, topology, options)
    _refuse_compiled_split(options, programs)
    _refuse_far_ties(facts, cuts)
    groups, group_of = _groups(units, facts, options.param_groups)
    check_elementwise(options.optimizer, groups, topology.device)
    ledger = Ledger()
    ledger.attach(topology.pp, topology.dp, topology.tp)
    separate_ties(units, facts)
    home = programs.rank_of_stage
    mine = {s: units[slice(*cuts[s])] for s in range(len(cuts)) if home[s] == topology.pp.rank}
    local = [unit for stage in sorted(mine) for unit in mine[stage]]
    give_values(local, facts, topology, options.precision, options.seed, options.init)
    if options.compile:
        for unit in local:
            unit.module.compile()
    dtype = DTYPES[options.precision]
    flats = _flats(local, facts, group_of, topology, options.zero, dtype)
    shards = Shards(flats, topology.dp, options.zero, _frozen(local))
    stages = {
        index: Stage(
            index,
            units,
            recompute=options.recompute == "full",
            before=shards.before,
            after=shards.reduce,
            check=shards.check,
            split=programs.splits_backward,
        )
        for index, units in mine.items()
    }
    borders = _borders(topology, home, options.timeout)
    owners = [fact for fact in facts.values() if fact.name == fact.owner and fact.trained]
    placed = {fact.index: fact.placement for fact in owners}
    return Parts(
        topology,
        facts,
        cuts,
        costs,
        stages,
        Interpreter(stages, len(home), borders, topology.describe()),
        programs,
        shards,
        NormSlots(placed, shards.trained(), topology.tp, topology.dp),
        ShardedOptimizer(options.optimizer, shards.trained(), groups, options.lr_schedule),
        SumLoss(loss_fn),
        num_items,
        ledger,
    )


def _refuse_compiled_split(options: Options, programs: Programs) -> None:
    """A compiled graph would lose the weight gradients that a layer puts off."""
    if options.compile and programs.splits_backward:
        raise ValueError(
            f"compile = True with schedule = {options.schedule!r}, which splits the backward, is "
            f"not built yet: use compile=False, or 1f1b or interleaved"
        )


def _refuse_far_ties(facts: dict[str, Facts], cuts: list[tuple[int, int]]) -> None:
    stage_of = {unit: s for s, (start, stop) in enumerate(cuts) for unit in range(start, stop)}
    for fact in facts.values():
        here, there = stage_of[fact.unit], stage_of[facts[fact.owner].unit]
        if here != there:
            raise ValueError(
                f"{fact.name} is tied to {fact.owner}, which lies in stage {there} and it in stage "
                f"{here}: a tie across stages is not built yet; use topology.pp=1 with 1 chunk, "
                f"pipeline.partition with both in one stage, or an untied model"
            )


def _groups(
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


def _flats(
    units: list[Unit],
    facts: dict[str, Facts],
    group_of: dict[str, int],
    topology: Topology,
    zero: int,
    precision: torch.dtype,
) -> dict[int, list[Flat]]:
    """Flat buffers by unit: one per dtype, and one for each tied parameter and each of its uses."""
    tied = {fact.owner for fact in facts.values() if fact.unit != facts[fact.owner].unit}
    first: dict[str, Flat] = {}
    flats: dict[int, list[Flat]] = {}
    for unit in units:
        buckets: dict[tuple[str, torch.dtype], list[Held]] = {}
        for path, parameter in unit.module.named_parameters():
            fact = facts[f"{unit.name}.{path}"]
            if parameter.requires_grad:
                held = Held(fact.name, parameter, fact.placement, fact.index, group_of[fact.owner])
                dtype = precision if parameter.is_floating_point() else parameter.dtype
                use = fact.owner if fact.owner in tied else ""
                buckets.setdefault((use, dtype), []).append(held)
        for (use, dtype), bucket in buckets.items():
            flat = Flat(
                bucket,
                topology.dp,
                topology.device,
                dtype=dtype,
                whole=zero == 0,
                of=first.get(use),
            )
            if use in tied:
                first.setdefault(use, flat)
            flats.setdefault(unit.number, []).append(flat)
    return flats


def _frozen(units: list[Unit]) -> dict[int, list[tuple[str, nn.Parameter]]]:
    """Parameters by unit and full name that are not trained."""
    return {
        unit.number: [
            (f"{unit.name}.{path}", parameter)
            for path, parameter in unit.module.named_parameters()
            if not parameter.requires_grad
        ]
        for unit in units
    }


def _borders(topology: Topology, home: list[int], timeout: float) -> dict[int, Border]:
    """The borders that this rank shares with another, over channels opened by all together."""
    far = {s: (home[s - 1], home[s]) for s in range(1, len(home)) if home[s - 1] != home[s]}
    edges = {s: (Edge(a, b, "activations"), Edge(b, a, "gradients")) for s, (a, b) in far.items()}
    channels = open_channels(topology, (edge for pair in edges.values() for edge in pair), timeout)
    return {
        s: Border(s, channels[forth], channels[back], topology.device)
        for s, (forth, back) in edges.items()
        if topology.pp.rank in far[s]
    }
