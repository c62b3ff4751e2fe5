"""What rank 0 tells at the start of a run, and leaves in its folder."""

from __future__ import annotations

import socket
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from .assemble.accounts import account
from .assemble.parts import Parts
from .comm.collectives import all_gather_objects
from .config import Config, to_yaml
from .engine import Engine
from .log.console import report
from .log.jsonl import replace
from .memory import device_bytes, predicted
from .pipeline.costs import Costs
from .pipeline.draw import Panel
from .pipeline.simulate import Timeline, simulate_costs
from .pipeline.svg import page

MANY = 8
UNITS = {"seconds": ("ms", 1e3), "FLOPs": ("GFLOP", 1e-9)}  # as a picture shows them


def write_run_files(folder: Path, config: Config, engine: Engine) -> None:
    """``config.yaml``, resolved; ``program.txt``, a line per pipeline rank as executed; and, where
    there are several, ``pipeline.svg``, the timeline that a step should have.
    """
    parts = engine.parts
    replace(folder / "config.yaml", to_yaml(config).encode())
    replace(folder / "program.txt", parts.programs.text().encode())
    if engine.topology.pp.size > 1:
        timeline, unit = forecast(parts)
        panel = Panel(f"predicted {_basis(parts)} · bubble {_bubble(timeline):.0%}", timeline)
        count = parts.programs.num_microbatches
        title = f"{config.name}: {config.pipeline.schedule}, {count} microbatches"
        replace(folder / "pipeline.svg", page([panel], title, unit).encode())


def forecast(parts: Parts) -> tuple[Timeline, str]:
    """A training step on paper and the unit of its time: milliseconds, if stages were measured."""
    costs, programs = parts.costs, parts.programs
    if costs is None:
        return programs.timeline(), ""
    shown, unit = _shown(costs, parts.cost_unit)
    return simulate_costs(programs.whole(programs.num_microbatches), shown), unit


def _shown(costs: Costs, cost_unit: str) -> tuple[Costs, str]:
    """Costs with times in the unit that a picture shows, and that unit."""
    unit, scale = UNITS[cost_unit]

    def scaled(times: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(scale * time for time in times)

    return costs._replace(
        forward=scaled(costs.forward),
        input_grad=scaled(costs.input_grad),
        weight_grad=scaled(costs.weight_grad),
        comm=scale * costs.comm,
    ), unit


class Place(NamedTuple):
    """A rank's host; bytes it will keep at most, by kind, and has; bytes it sends in a step over
    dp; and of its trained elements how many defer.
    """

    host: str
    kept: dict[str, float]
    memory: int
    sent: int
    deferred: int
    trained: int


def places(engine: Engine) -> list[Place]:
    """Of every rank. Collective."""
    shares = [stage.deferred_parameters for stage in engine.parts.stages.values()]
    deferred, trained = (sum(column) for column in zip(*shares, strict=True))
    sent = account(engine.parts).sent.over_dp
    memory = device_bytes(engine.topology.device)
    host, kept = socket.gethostname(), kept_by(engine.parts)
    mine = Place(host, kept, memory, sent, deferred, trained)
    return all_gather_objects(mine, engine.topology.world)


def kept_by(parts: Parts) -> dict[str, float]:
    """Bytes of this rank at most, by kind: activations where units were measured."""
    states, most = predicted(parts), account(parts)
    kept: dict[str, float] = {
        "parameters": states.parameters,
        "gradients": most.gradients,
        "optimizer": states.optimizer,
    }
    if parts.shards.keeps_owned:
        kept["gathered"] = most.gathered
    if parts.costs is not None:
        kept["activations"] = forecast(parts)[0].peak_bytes[parts.topology.pp.rank]
    return kept


def report_start(
    folder: Path, config: Config, engine: Engine, start: str, ranks: list[Place]
) -> None:
    """Grid and hosts, stages, batch, bytes, folder, where it starts and W&B's mode, as a table."""
    parts, grid = engine.parts, engine.topology.grid
    microbatches = config.pipeline.num_microbatches or 1
    hosts = sorted({rank.host for rank in ranks})
    batch = config.data.global_batch_size
    size = batch // (grid.dp * microbatches)
    timeline, _ = forecast(parts)
    bubble = f"bubble {_bubble(timeline):.0%} of a step {_basis(parts)}"
    rows = [
        ("grid", f"pp {grid.pp} x dp {grid.dp} x tp {grid.tp} on {', '.join(hosts)}"),
        ("zero", f"stage {config.zero.stage}{_sent(ranks)}"),
        ("parameters", f"{sum(_sizes(engine)):,}"),
        *((f"stage {s}", _stage(engine, s)) for s in range(len(parts.cuts))),
        ("schedule", f"{_schedule(config, engine)}, {bubble}"),
        *([("split", _deferred(ranks))] if parts.programs.splits_backward else []),
        ("batch", f"{batch} = dp {grid.dp} x microbatches {microbatches} x {size}"),
        *_bytes_of(ranks),
        ("run folder", str(folder)),
        ("wandb", config.log.wandb.mode or "disabled"),
        ("start", start),
    ]
    report(f"{config.name}", rows)


def _schedule(config: Config, engine: Engine) -> str:
    """The schedule by name, and what ``auto`` took."""
    asked, took = config.pipeline.schedule, engine.parts.programs.source.name
    return asked if asked == took else f"{asked}: {took}"


def _deferred(ranks: list[Place]) -> str:
    """How far a split backward is one: the rest is made with the input gradients."""
    share = sum(rank.deferred for rank in ranks) / max(1, sum(rank.trained for rank in ranks))
    return f"{share:.0%} of the parameters have their gradients made apart from the inputs'"


def _bytes_of(ranks: list[Place]) -> list[tuple[str, str]]:
    """The most bytes of each rank by kind, and their sum; of many ranks only the largest."""
    totals = [sum(rank.kept.values()) for rank in ranks]
    shown = range(len(ranks)) if len(ranks) <= MANY else [totals.index(max(totals))]
    return [
        (
            f"rank {at}",
            f"{_mb(totals[at])} of {_mb(ranks[at].memory)}: "
            + ", ".join(f"{kind} {_mb(size)}" for kind, size in ranks[at].kept.items()),
        )
        for at in shown
    ]


def _sent(ranks: list[Place]) -> str:
    most = max(rank.sent for rank in ranks)
    return f", a rank sends {_mb(most)} over dp in a step" if most else ""


def _sizes(engine: Engine) -> list[int]:
    sizes = [0] * (max(fact.unit for fact in engine.parts.facts.values()) + 1)
    for fact in engine.parts.facts.values():
        if fact.name == fact.owner:
            count = 1
            for length in fact.shape:
                count *= length
            sizes[fact.unit] += count
    return sizes


def _stage(engine: Engine, stage: int) -> str:
    start, stop = engine.parts.cuts[stage]
    count = sum(_sizes(engine)[start:stop])
    rank = engine.parts.programs.rank_of_stage[stage]
    said = f"units {start}..{stop - 1} on pp rank {rank}, {count:,} parameters"
    costs = engine.parts.costs
    if costs is None:
        return said
    shown, unit = _shown(costs, engine.parts.cost_unit)
    each = [sum(times) for times in zip(*shown[:3], strict=True)]
    return f"{said}, {each[stage]:.3g} {unit} a microbatch ({each[stage] / sum(each):.0%})"


def _bubble(timeline: Timeline) -> float:
    """The share of a step that a rank idles, on average."""
    return fmean(timeline.idle_shares)


def _basis(parts: Parts) -> str:
    """What the prediction rests on."""
    if parts.costs is None:
        return "if stages cost the same"
    return "with measured times" if parts.cost_unit == "seconds" else "by counted FLOPs"


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"
