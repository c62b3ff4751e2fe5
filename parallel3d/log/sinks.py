"""The log of a run: one record a step, to the console, to ``metrics.jsonl`` and to W&B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .console import Progress
from .jsonl import Jsonl
from .meters import Record
from .tracker import Tracker


@dataclass(frozen=True)
class WandbSettings:
    """``log.wandb`` as the user gave it, but for ``mode``: see ``tracker.check_wandb``."""

    mode: str = "disabled"
    project: str = "parallel3d"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    timeout: float = 60.0


class Log:
    """Takes each step's record once and hands it to the sinks of rank 0; elsewhere it has none.

    Args:
        run_folder: the run's folder, made already (on rank 0).
        config: the resolved configuration, for W&B.
        is_rank0: global rank 0, the one writer. Other ranks call the same methods to no effect.
        num_steps: the last step of the run, for the seconds left.
        every: steps between two lines where the output is no terminal; 0: only evaluations.
        wandb: where W&B writes; ``mode`` is one that ``check_wandb`` returned.
        resume_step: the step of the checkpoint gone on from; 0 in a new run.

    A step's evaluation comes before its record, so that every sink sees the step once and whole::

        if step % eval_every == 0:
            log.evaluated(step, val_loss)
        log.step(record)
        if step % checkpoint_every == 0:  # the line of a saved step is in the file already
            engine.save(...)
    """

    def __init__(
        self,
        run_folder: Path,
        config: Mapping[str, Any],
        *,
        is_rank0: bool,
        num_steps: int,
        every: int = 10,
        wandb: WandbSettings | None = None,
        resume_step: int = 0,
    ) -> None:
        wandb = wandb or WandbSettings()
        self._val_loss: tuple[int, float] | None = None
        self._progress: Progress | None = None
        self._files: list[Jsonl | Tracker] = []
        if not is_rank0:
            return
        lines = Jsonl(run_folder / "metrics.jsonl", resume_step=resume_step)
        self._files.append(lines)
        if wandb.mode != "disabled":
            self._files.append(
                Tracker(
                    run_folder,
                    config,
                    mode=wandb.mode,
                    project=wandb.project,
                    entity=wandb.entity,
                    group=wandb.group,
                    tags=wandb.tags,
                    rewound=lines.dropped,
                    timeout=wandb.timeout,
                )
            )
        self._progress = Progress(num_steps=num_steps, done=resume_step, every=every)

    def evaluated(self, step: int, val_loss: float) -> None:
        """Keep the validation loss of a step until its record comes."""
        self._val_loss = (step, val_loss)

    def step(self, record: Record, extra: Mapping[str, float] | None = None) -> None:
        """Write the record of a step; ``extra`` values (``stage/0/memory``) go to W&B alone.

        Raises:
            ValueError: the last evaluation was of another step.
        """
        if self._val_loss is not None:
            evaluated, val_loss = self._val_loss
            if evaluated != record.step:
                raise ValueError(
                    f"evaluated({evaluated}, ...) came before the record of step {record.step}: "
                    "a step's evaluation comes right before its record"
                )
            record = replace(record, val_loss=val_loss)
            self._val_loss = None
        row = record.row()
        for file in self._files:
            file.write({**row, **(extra or {})} if isinstance(file, Tracker) else row)
        if self._progress is not None:
            self._progress.write(record)

    def close(self, failed: bool = False) -> None:
        """End the run: the last lines are written, W&B finishes. A second call does nothing."""
        if self._progress is not None:
            self._progress.close()
        for file in self._files:
            file.close(failed)
        self._files, self._progress = [], None
