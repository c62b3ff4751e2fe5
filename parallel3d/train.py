"""The training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .build import build_data, build_engine, build_meter, build_model
from .checkpoint.retention import prune, step_folder
from .config import Config, to_plain
from .data import Prefetch
from .engine import Engine, StepResult
from .log.clock import clock_of, host_offset
from .log.memory import gather, stages, totals
from .log.meters import Meter, Record
from .log.recorder import Recorder
from .log.sinks import Log, WandbSettings
from .log.trace import write_trace
from .memory import Memory, memory
from .pipeline.trace import Trace
from .report import places, report_start, write_run_files
from .resume import Resumed, resume
from .topology import Topology


def train(
    config: Config,
    topology: Topology,
    folder: Path,
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Train to ``config.train.steps``, or to the step border at which ``stopping()`` is true.

    ``stopping`` is collective: every rank asks it after each step and gets the same answer.
    ``folder`` is the run's, made already; ``config.log.wandb.mode`` is what ``check_wandb`` gave,
    and null is no W&B. Raises what the parts raise, on every rank.
    """
    data = build_data(config)
    model = build_model(config, topology, data)
    meter = build_meter(config, topology, model, tokens=0)
    engine = build_engine(config, topology, model, data)
    with engine.watch.during("the start of the run"):
        start = resume(config, folder, engine, data)
        meter.tokens = start.tokens
        ranks = places(engine)
        if topology.rank == 0:
            write_run_files(folder, config, engine)
            report_start(folder, config, engine, start.said, ranks)
    log = open_log(config, folder, topology, start)
    failed = True
    try:
        with engine.watch.during("the training loop"):
            loop(config, topology, folder, data, engine, meter, log, stopping)
        failed = False
    finally:
        log.close(failed)


def loop(
    config: Config,
    topology: Topology,
    folder: Path,
    data: Any,
    engine: Engine,
    meter: Meter,
    log: Log,
    stopping: Callable[[], bool],
) -> None:
    """Step, evaluate, log, save; each in this order, so that a saved step's line is written."""
    steps, slots = config.train.steps, slots_of(config, topology)
    batches = Prefetch(
        data.train, slots, engine.step, steps, seed=config.seed, workers=config.data.workers
    )
    tokens = config.data.global_batch_size * config.data.seq_len
    recorder = Recorder(clock_of(topology.device), host_offset(topology.world))
    watch = engine.watch
    for x, target in watch.each("data loading", batches):
        engine.parts.ledger.reset()
        with meter.timed(tokens), recorder.listening(engine.parts.interpreter):
            result = engine.train_step(x, target)
        step, last, val_loss = engine.step, engine.step == steps, None
        record, extra = record_of(engine, result, meter, recorder)
        if due(step, config.train.eval_every) or (last and config.train.eval_every):
            with watch.during("evaluation"):
                val_loss = evaluate(config, topology, data, engine)
            log.evaluated(step, math.nan if val_loss is None else val_loss)
        with watch.during("logging"):
            log.step(record, extra)
        stop = stopping()
        if due(step, config.log.trace) or ((last or stop) and config.log.trace):
            write_trace(folder / "trace.json", topology, recorder.read(), about(config, engine))
        if due(step, config.checkpoint.every) or last or stop:
            checkpoints = folder / "checkpoints"
            fingerprint = getattr(data, "fingerprint", None)
            engine.save(
                step_folder(checkpoints, step),
                tokens=meter.tokens,
                val_loss=val_loss if val_loss is not None and math.isfinite(val_loss) else None,
                data=fingerprint,
                config=to_plain(config),
            )
            with watch.during("the removal of old checkpoints"):
                prune(checkpoints, config.checkpoint.keep, topology.world)
        if stop:
            break


def record_of(
    engine: Engine, result: StepResult, meter: Meter, recorder: Recorder
) -> tuple[Record, dict[str, float]]:
    """A step's line, and what W&B has besides. Collective: the one message of the log a step."""
    topology, parts = engine.topology, engine.parts
    kept = memory(parts) if topology.rank == 0 else Memory(0, 0, 0)
    ranks = gather(topology.world, topology.device, parts.ledger.bytes(), recorder.window())
    held = stages(ranks, topology.grid, parts.programs.rank_of_stage)
    record = Record(
        step=engine.step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        skipped=result.skipped,
        memory_parameters=kept.parameters,
        memory_gradients=kept.gradients,
        memory_optimizer=kept.optimizer,
        stage_bubble=tuple(stage.bubble for stage in held),
        loss_scale=None if engine.scaler is None else engine.loss_scale,
        **totals(ranks)._asdict(),
        **meter.rates(),
    )
    return record, {f"stage/{k}/memory": stage.memory for k, stage in enumerate(held)}


def about(config: Config, engine: Engine) -> Trace:
    """The trace of the step that the engine has done, without what the ranks did."""
    programs, parts = engine.parts.programs, engine.parts
    costs = parts.costs if parts.cost_unit == "seconds" else None
    program = programs.whole(programs.num_microbatches)
    return Trace(config.name or "", engine.step, config.pipeline.schedule, program, costs, [])


def evaluate(config: Config, topology: Topology, data: Any, engine: Engine) -> float | None:
    """The mean loss per item over ``eval_batches`` batches of validation data; None without any."""
    total, items = 0.0, 0
    slots = slots_of(config, topology)
    for step in range(config.train.eval_batches):
        with engine.watch.during("loading of validation data"):
            x, target = data.validation(step, slots)
        result = engine.eval_step(x, target)
        if result.num_items:
            total, items = total + result.loss * result.num_items, items + result.num_items
    return total / items if items else None


def slots_of(config: Config, topology: Topology) -> list[int]:
    """This dp rank's samples of every global batch, in order."""
    slots = torch.arange(config.data.global_batch_size)
    return torch.tensor_split(slots, topology.dp.size)[topology.dp.rank].tolist()


def due(step: int, every: int) -> bool:
    """Whether ``step`` is one of every so many; 0 is never."""
    return every > 0 and step % every == 0


def open_log(config: Config, folder: Path, topology: Topology, start: Resumed) -> Log:
    """The log of rank 0; elsewhere one that writes nothing."""
    about = config.log.wandb
    settings = WandbSettings(
        mode=about.mode or "disabled",
        project=about.project,
        entity=about.entity,
        group=about.group,
        tags=tuple(about.tags),
    )
    return Log(
        folder,
        to_plain(config),
        is_rank0=topology.rank == 0,
        num_steps=config.train.steps,
        every=config.log.every,
        wandb=settings,
        resume_step=start.step,
    )
