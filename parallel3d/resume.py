"""Where a run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from .checkpoint.agree import on_rank_0
from .checkpoint.files import LOCAL
from .checkpoint.names import discard
from .checkpoint.retention import latest_valid, list_checkpoints, step_of
from .config import Config, check_resume, load
from .engine import Engine


class Resumed(NamedTuple):
    """Steps and tokens that lie behind a run, and what rank 0 tells of it."""

    step: int = 0
    tokens: int = 0
    said: str = "at step 0"


def resume(config: Config, folder: Path, engine: Engine, data: Any) -> Resumed:
    """Load what ``checkpoint.resume`` says; a new run where there is nothing. Collective.

    Raises ValueError, on every rank, for a difference in the configuration or in the data that
    would make it another run.
    """
    choice = config.checkpoint.resume
    if choice == "never":
        return Resumed()
    world = engine.topology.world
    found = latest_valid(folder / "checkpoints", world) if choice == "auto" else Path(choice)
    if found is None:
        return Resumed(said=f"at step 0: {folder} holds no checkpoint to resume")
    if (found / "checkpoints").is_dir():
        raise ValueError(
            f"checkpoint.resume = {choice!r} is a run: name one of its checkpoints, "
            f"such as {found}/checkpoints/step-00000100, or use name={found.name} with auto"
        )
    saved = found.parent.parent / "config.yaml"
    on_rank_0(world, lambda: check_resume(load(saved), config) if saved.exists() else None)
    meta = engine.load(found)
    fingerprint = getattr(data, "fingerprint", None)
    if meta.get("data") != fingerprint:
        raise ValueError(
            f"data.path = {config.data.path} holds other tokens than the run to resume was trained "
            f"on: bring that data back, or start a new run with another name"
        )
    if choice != "auto" and folder.resolve() in found.resolve().parents:
        on_rank_0(world, lambda: _retire(folder / "checkpoints", engine.step))
    said = f"at step {engine.step}, from {found}"
    if engine.step >= config.train.steps:
        said += f"; train.steps = {config.train.steps} is done: set it higher to go on"
    return Resumed(engine.step, meta.get("tokens", 0), said)


def _retire(checkpoints: Path, step: int) -> None:
    """A run that goes back leaves what came later: it would be taken for the newest."""
    for checkpoint in list_checkpoints(checkpoints):
        if step_of(checkpoint) > step:
            discard(checkpoint, LOCAL)
