"""Which checkpoint to resume from, and which to delete."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

from ..comm.collectives import broadcast_object
from ..topology import Axis
from .agree import on_rank_0
from .damage import damage, wrong_size
from .files import LOCAL, Files
from .manifest import Manifest, read_manifest
from .names import discard

NAME = re.compile(r"(step-(\d{8,}))(?:\.(tmp|old)-\w+)?")


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies: ``step-00000100``."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint that ``step_folder`` named."""
    match = NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named as a step, like {step_folder(Path(), 100)}")
    return int(match[2])


def list_checkpoints(folder: Path) -> list[Path]:
    """Every checkpoint in a folder, oldest first, sound or not. Reads no file."""
    found = {folder / name for name, _, kind in _entries(folder) if kind != "tmp"}
    return sorted(found, key=step_of)


def latest_valid(folder: Path, world: Axis, files: Files = LOCAL) -> Path | None:
    """The newest complete and undamaged checkpoint, or None where there is none. Collective.

    Rank 0 warns of each newer one that is damaged. Reads all of the data files once, each rank its
    share. Raises RuntimeError on every rank where all checkpoints are damaged: going on from
    nothing would be no resumption.
    """
    skipped: list[str] = []
    for checkpoint in reversed(broadcast_object(list_checkpoints(folder), world)):
        problem = _problem(checkpoint, world, files)
        if problem is None:
            if skipped and world.rank == 0:
                warnings.warn(f"{'; '.join(skipped)}; taking {checkpoint}", stacklevel=2)
            return Path(checkpoint)
        skipped.append(problem)
    if skipped:
        raise RuntimeError(
            f"{folder} has no checkpoint that is undamaged: {'; '.join(skipped)}; restore one, or "
            f"remove the folder to start anew"
        )
    return None


def prune(folder: Path, keep: int, world: Axis, *, best: bool = True, files: Files = LOCAL) -> None:
    """Delete all but the last ``keep`` complete checkpoints and the ``best``. Collective.

    The best has the lowest ``meta["val_loss"]``, the newest of equal ones. Rank 0 alone deletes,
    so this is called after ``save`` has returned. What an interrupted save left goes too; a
    damaged checkpoint neither counts nor is touched. Raises ValueError for ``keep < 1``.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep = {keep} must be at least 1")
    on_rank_0(world, lambda: _prune(folder, keep, best, files))


def _entries(folder: Path) -> list[tuple[str, Path, str | None]]:
    """(name of the checkpoint, path, ``tmp`` or ``old`` or None) of what lies in the folder."""
    if not folder.is_dir():
        return []
    matches = [(NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return [(match[1], path, match[3]) for match, path in matches if match]


def _problem(checkpoint: Path, world: Axis, files: Files) -> str | None:
    """What is wrong with a checkpoint, the same on every rank."""
    found: Manifest | str | None = None
    if world.rank == 0:
        try:
            found = read_manifest(checkpoint, files)
        except RuntimeError as error:
            found = str(error)
    found = broadcast_object(found, world)
    return damage(checkpoint, found, world, files) if isinstance(found, Manifest) else found


def _prune(folder: Path, keep: int, best: bool, files: Files) -> None:
    for name, path, kind in _entries(folder):
        if kind == "tmp":
            files.remove_folder(path)
        elif kind == "old" and (folder / name).exists():
            discard(path, files)
        elif kind == "old":
            files.rename(path, folder / name)
    complete = {
        checkpoint: manifest.meta
        for checkpoint in list_checkpoints(folder)
        if (manifest := _complete(checkpoint, files)) is not None
    }
    kept = set(list(complete)[-keep:])
    losses = [
        (meta["val_loss"], -step_of(checkpoint), checkpoint)
        for checkpoint, meta in complete.items()
        if meta.get("val_loss") is not None
    ]
    if best and losses:
        kept.add(min(losses)[-1])
    for checkpoint in complete.keys() - kept:
        discard(checkpoint, files)


def _complete(checkpoint: Path, files: Files) -> Manifest | None:
    """The manifest where every file is there in its size; contents are not read."""
    try:
        manifest = read_manifest(checkpoint, files)
    except RuntimeError:
        return None
    return None if wrong_size(checkpoint, manifest, files) else manifest
