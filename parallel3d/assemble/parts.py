"""From the engine's arguments to the parts that it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..comm.host import host_axis
from ..comm.ledger import Ledger
from ..comm.lines import open_lines
from ..comm.p2p import Edge, open_channels
from ..optim.norm import NormSlots
from ..optim.optimizer import ShardedOptimizer
from ..optim.whole import WholeOptimizer
from ..pipeline.actions import Action
from ..pipeline.border import Border
from ..pipeline.costs import Costs
from ..pipeline.criterion import SumLoss, as_sum, default_num_items
from ..pipeline.runtime import Interpreter, Step
from ..pipeline.stage import Stage, Unit
from ..topology import Topology
from ..zero.shards import Shards
from .flats import Sharding, flats_of, frozen_of, groups_of, kept_of
from .keeping import activations_of
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
from .ties import check_placements, fixed_of, share_values, shared_by, tie_by_name, ties_of
from .update import check_optimizer, make_optimizer
from .uses import uses_here, uses_of

GATHER_BUDGET = 2**28  # bytes


@dataclass
class Parts:
    """What the engine runs on this rank. ``facts`` are those of the whole model."""

    topology: Topology
    facts: dict[str, Facts]
    cuts: list[tuple[int, int]]
    costs: Costs | None
    cost_unit: str
    stages: dict[int, Stage]
    interpreter: Interpreter
    programs: Programs
    shards: Shards
    slots: NormSlots
    optimizer: ShardedOptimizer | WholeOptimizer
    criterion: SumLoss
    num_items: Callable[[Any], Tensor | int]
    ledger: Ledger

    @property
    def units(self) -> list[Unit]:
        """This rank's units, in model order."""
        return [unit for index in sorted(self.stages) for unit in self.stages[index].units]

    @property
    def unit_numbers(self) -> dict[int, list[int]]:
        """Of each of this rank's stages."""
        return {at: [unit.number for unit in self.stages[at].units] for at in self.stages}

    def run(self, actions: Sequence[Action], step: Step) -> None:
        """Do this rank's actions of a program. Collective over the world.

        Those of microbatches that the step has not are left out; parameters that they use are
        gathered none the less, for ranks that have them.
        """
        numbers, count = self.unit_numbers, len(step.seeds)
        here = uses_here(actions, numbers, count)
        self.shards.begin(uses_of(actions, numbers), count, step.training, here)
        self.interpreter.run([action for action in actions if action.microbatch < count], step)
        self.shards.end()


def assemble(model: nn.Module, topology: Topology, options: Options) -> Parts:
    """Cut the model, give it values, and connect the parts. Collective over the world.

    Whatever can be refused is refused on every rank before anything is sent.
    """
    units = units_of(model)
    tie_by_name(units, options.tied or ())
    check_batch_norm(units, topology.dp.size, options.num_microbatches)
    check_state(units)
    check_values(units, options.precision, options.init is not None)
    loss_fn = as_sum(options.loss_fn)
    num_items = options.num_items or default_num_items(options.loss_fn)
    facts = facts_of(units)
    check_placements(facts)
    programs, cuts, costs, unit = make_plan(units, facts, topology, options)
    groups, group_of = groups_of(units, facts, options.param_groups)
    rule = check_optimizer(options, groups, group_of, facts, topology.device)
    ledger = Ledger()
    host = host_axis(topology.rank)
    ledger.attach(topology.pp, topology.dp, topology.tp, host)
    activations = activations_of(options, topology, host)
    home = programs.rank_of_stage
    home_of = [home[stage] for stage, (start, stop) in enumerate(cuts) for _ in range(start, stop)]
    sharding = Sharding.open(topology, options)
    shards = _shards(units, facts, group_of, home_of, topology, options, sharding)
    stages = {
        index: Stage(
            index,
            units[start:stop],
            activations=activations,
            weights=shards,
            split=programs.splits_backward,
        )
        for index, (start, stop) in enumerate(cuts)
        if home[index] == topology.pp.rank
    }
    borders = _borders(topology, home, options.timeout)
    owners = [fact for fact in facts.values() if fact.name == fact.owner and fact.trained]
    placed = {fact.index: fact.placement for fact in owners}
    return Parts(
        topology,
        facts,
        cuts,
        costs,
        unit,
        stages,
        Interpreter(stages, len(home), borders, topology.describe()),
        programs,
        shards,
        NormSlots(placed, shards.trained(), topology.tp, sharding.axis, sharding.replicas),
        make_optimizer(rule, shards, groups, topology, options, host),
        SumLoss(loss_fn),
        num_items,
        ledger,
    )


def _shards(
    units: list[Unit],
    facts: dict[str, Facts],
    group_of: dict[str, int],
    home_of: list[int],
    topology: Topology,
    options: Options,
    sharding: Sharding,
) -> Shards:
    """This rank's units with their values, in flat buffers. ``home_of`` is each unit's rank."""
    shared = shared_by(units, home_of)
    axes = open_lines(topology, (each.holders for each in shared), options.timeout)
    separate_ties(units, facts)
    local = [unit for unit in units if home_of[unit.number] == topology.pp.rank]
    give_values(local, facts, topology, options.precision, options.seed, options.init)
    share_values(local, shared, axes)
    if options.compile:
        for unit in local:
            unit.module.compile()
    tied = {each.owner for each in shared}
    flats = flats_of(local, facts, group_of, tied, sharding, options.precision)
    return Shards(
        flats,
        frozen=frozen_of(local),
        kept=kept_of(local, facts, sharding),
        replicas=sharding.replicas,
        each=sharding.each,
        budget=GATHER_BUDGET if options.gather_budget is None else options.gather_budget,
        ties=ties_of(shared, facts, flats, axes),
        fixed=fixed_of(local, shared, facts),
        wire=DTYPES[options.reduce_dtype] if options.reduce_dtype else None,
    )


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
