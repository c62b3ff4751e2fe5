"""What rank 0 tells at the start of a run, and leaves in its folder."""

from __future__ import annotations

import socket
from pathlib import Path

from .config import Config, to_yaml
from .engine import Engine
from .log.console import report
from .log.jsonl import replace
from .memory import memory


def write_run_files(folder: Path, config: Config, engine: Engine) -> None:
    """``config.yaml``, resolved, and ``program.txt``, a line per pipeline rank as executed."""
    replace(folder / "config.yaml", to_yaml(config).encode())
    replace(folder / "program.txt", engine.parts.programs.text().encode())


def report_start(folder: Path, config: Config, engine: Engine, start: str) -> None:
    """Grid, stages, batch, memory, folder, where it starts and W&B's mode, as a table."""
    parts, grid = engine.parts, engine.topology.grid
    local, microbatches = memory(parts), config.pipeline.num_microbatches or 1
    batch = config.data.global_batch_size
    size = batch // (grid.dp * microbatches)
    timeline = parts.programs.timeline
    rows = [
        ("grid", f"pp {grid.pp} x dp {grid.dp} x tp {grid.tp} on {socket.gethostname()}"),
        ("zero", f"stage {config.zero.stage}"),
        ("parameters", f"{sum(_sizes(engine)):,}"),
        *((f"stage {s}", _stage(engine, s)) for s in range(len(parts.cuts))),
        (
            "schedule",
            f"{config.pipeline.schedule}, bubble {timeline.bubble / timeline.makespan:.0%} "
            f"of a step if stages cost the same",
        ),
        ("batch", f"{batch} = dp {grid.dp} x microbatches {microbatches} x {size}"),
        ("rank 0", f"parameters {_mb(local.parameters)}, gradients {_mb(local.gradients)}"),
        ("run folder", str(folder)),
        ("wandb", config.log.wandb.mode or "disabled"),
        ("start", start),
    ]
    report(f"{config.name}", rows)


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
