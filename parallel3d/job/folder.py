"""One run, one folder: named and made on rank 0, and gone again if nothing was written there."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from ..checkpoint.agree import on_rank_0
from ..config import Config
from ..topology import Axis


@contextmanager
def claimed(config: Config, model: str, world: Axis) -> Iterator[Path]:
    """The run's folder `run_root/name`, the same path on every rank. Collective.

    Without `name` it is called after `model` and the time; `-2`, `-3` are added where another job
    took that name in the same second. A new folder is removed again by an error that came before
    the first step was done. Rank 0 holds a lock on the folder, so that no second job, for example
    one requeued too early, writes there too.

    Raises:
        ValueError: the run exists and `checkpoint.resume` is never, another job runs in it, or the
            path to resume from does not exist or is another run's; on every rank.
    """
    with ExitStack() as held:
        folder, fresh = on_rank_0(world, lambda: _claim(config, model, held))
        try:
            yield folder
        except BaseException:
            if fresh and world.rank == 0 and not _has_begun(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _has_begun(folder: Path) -> bool:
    """Whether a step was done."""
    lines = folder / "metrics.jsonl"
    return (lines.exists() and lines.stat().st_size > 0) or (folder / "checkpoints").exists()


def _claim(config: Config, model: str, held: ExitStack) -> tuple[Path, bool]:
    folder, fresh = _folder(config, model)
    lock = held.enter_context((folder / ".lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"name = {folder.name!r}: another job is running in {folder}: wait until it has ended, "
            f"or start a run with another name"
        ) from None
    return folder, fresh


def _folder(config: Config, model: str) -> tuple[Path, bool]:
    root, resume = Path(config.run_root), config.checkpoint.resume
    if resume not in ("never", "auto") and not Path(resume).exists():
        raise ValueError(
            f"checkpoint.resume = {resume!r} does not exist: it is never, auto, or the path of a "
            f"checkpoint, such as {root}/NAME/checkpoints/step-00000100"
        )
    root.mkdir(parents=True, exist_ok=True)
    if config.name is None:
        return _make_new(root, f"{model}-{time.strftime('%Y%m%d-%H%M%S')}"), True
    folder = root / config.name
    try:
        folder.mkdir()  # atomic: of two jobs with one name the second is told
    except FileExistsError:
        if resume == "never":
            raise ValueError(
                f"name = {config.name!r}: the run {folder} exists already: "
                f"checkpoint.resume=auto continues it, another name= starts a new one"
            ) from None
        if resume != "auto" and folder.resolve() not in Path(resume).resolve().parents:
            raise ValueError(
                f"checkpoint.resume = {resume!r} is not of the run {folder}, which exists already: "
                f"name= a new run to start from it"
            ) from None
        return folder, False
    return folder, True


def _make_new(root: Path, name: str) -> Path:
    for number in count(1):
        folder = root / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("unreachable: count does not end")
