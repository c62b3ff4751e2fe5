"""What rank 0 tells at the start of a run, and leaves in its folder."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import NamedTuple

from .comm.collectives import all_gather_objects
from .config import Config, to_yaml
from .engine import Engine
from .log.console import report
from .log.jsonl import replace
from .memory import Memory, predicted

MANY = 8


def write_run_files(folder: Path, config: Config, engine: Engine) -> None:
    """``config.yaml``, resolved, and ``program.txt``, a line per pipeline rank as executed."""
    replace(folder / "config.yaml", to_yaml(config).encode())
    replace(folder / "program.txt", engine.parts.programs.text().encode())


class Place(NamedTuple):
    """A rank's host, and the bytes it will keep."""

    host: str
    memory: Memory


def places(engine: Engine) -> list[Place]:
    """Of every rank. Collective."""
    mine = Place(socket.gethostname(), predicted(engine.parts))
    return all_gather_objects(mine, engine.topology.world)


def report_start(
    folder: Path, config: Config, engine: Engine, start: str, ranks: list[Place]
) -> None:
    """Grid and hosts, stages, batch, bytes, folder, where it starts and W&B's mode, as a table."""
    parts, grid = engine.parts, engine.topology.grid
    microbatches = config.pipeline.num_microbatches or 1
    hosts = sorted({rank.host for rank in ranks})
    batch = config.data.global_batch_size
    size = batch // (grid.dp * microbatches)
    timeline = parts.programs.timeline()
    rows = [
        ("grid", f"pp {grid.pp} x dp {grid.dp} x tp {grid.tp} on {', '.join(hosts)}"),
        ("zero", f"stage {config.zero.stage}"),
        ("parameters", f"{sum(_sizes(engine)):,}"),
        *((f"stage {s}", _stage(engine, s)) for s in range(len(parts.cuts))),
        (
            "schedule",
            f"{config.pipeline.schedule}, bubble {timeline.bubble / timeline.makespan:.0%} "
            f"of a step if stages cost the same",
        ),
        ("batch", f"{batch} = dp {grid.dp} x microbatches {microbatches} x {size}"),
        *_bytes_of(ranks),
        ("run folder", str(folder)),
        ("wandb", config.log.wandb.mode or "disabled"),
        ("start", start),
    ]
    report(f"{config.name}", rows)


def _bytes_of(ranks: list[Place]) -> list[tuple[str, str]]:
    """Predicted bytes of each rank, without activations; of many ranks only the largest."""
    totals = [sum(rank.memory) for rank in ranks]
    shown = range(len(ranks)) if len(ranks) <= MANY else [totals.index(max(totals))]
    return [
        (
            f"rank {at}",
            f"{_mb(totals[at])}: parameters {_mb(ranks[at].memory.parameters)}, gradients "
            f"{_mb(ranks[at].memory.gradients)}, optimizer {_mb(ranks[at].memory.optimizer)}",
        )
        for at in shown
    ]


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
    return f"units {start}..{stop - 1} on pp rank {rank}, {count:,} parameters"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
