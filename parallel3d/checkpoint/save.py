"""Write a checkpoint: all of it, or nothing."""

from __future__ import annotations

import errno
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..comm.collectives import broadcast_object, gather_objects
from ..topology import Axis
from .agree import agree, on_rank_0
from .damage import Checksums, wrong_size
from .files import LOCAL, Files
from .fragment import Fragment
from .manifest import BLOCK_BYTES, NAME, DataFile, Manifest, Piece, TensorEntry, check_meta
from .names import beside, discard, siblings

DATA = re.compile(r"rank-[0-9]+\.bin")


class Part(NamedTuple):
    """What one rank wrote."""

    name: str
    file: DataFile
    tensors: dict[str, TensorEntry]


def save(
    folder: Path,
    fragments: Sequence[Fragment],
    meta: dict[str, Any],
    world: Axis,
    files: Files = LOCAL,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> None:
    """Write every rank's fragments and rank 0's ``meta`` as the checkpoint ``folder``. Collective.

    Every element of every key must be in exactly one fragment of one rank. Data goes into a
    temporary folder beside ``folder``, each file to the device before the manifest, and the
    temporary folder takes its name last: at no moment is there half a checkpoint under it. One
    that was there is replaced, and only then removed.

    Moves   per rank, its list of fragments; no tensor data.

    Raises on every rank, with the first failing rank's text, if any rank fails: ValueError for
    fragments or a ``meta`` that cannot be saved, RuntimeError or OSError for the file system.
    What was saved before stays as it was.
    """
    if not folder.name:
        raise ValueError(f"{str(folder)!r} names no folder: save to one of its own, such as step-1")
    temporary = beside(folder, "tmp", broadcast_object(secrets.token_hex(4), world))
    try:
        on_rank_0(world, lambda: _begin(folder, temporary, meta, files))
        part = agree(world, lambda: _written(temporary, fragments, block_bytes, world, files))
        parts = gather_objects(part, world)  # [] but on rank 0
        on_rank_0(world, lambda: _publish(folder, temporary, parts, meta, block_bytes, files))
    except Exception:
        if world.rank == 0 and temporary.exists():
            with suppress(OSError):  # the next save removes it
                files.remove_folder(temporary)
        raise


def _begin(folder: Path, temporary: Path, meta: dict[str, Any], files: Files) -> None:
    check_meta(meta)
    _check_own(folder)
    for stale in siblings(folder, "tmp"):
        files.remove_folder(stale)
    files.make_folder(temporary)


def _check_own(folder: Path) -> None:
    """Refuse to replace what is no checkpoint."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: save a checkpoint to a folder of its own")
    files = (each for each in folder.rglob("*") if not each.is_dir())
    others = (f for f in files if f != folder / NAME and not DATA.fullmatch(f.name))
    if (other := next(others, None)) is not None:
        raise ValueError(
            f"{folder} has other things in it, such as {other.relative_to(folder)}, and a "
            f"checkpoint takes the whole folder: save to one of its own, such as "
            f"{folder / 'step-1'}"
        )


def _written(
    temporary: Path, fragments: Sequence[Fragment], block_bytes: int, world: Axis, files: Files
) -> Part:
    """As ``_write_part``; an error of the disk says which, and what would have been needed."""
    try:
        return _write_part(temporary, fragments, block_bytes, world, files)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        needed = sum(fragment.data.nbytes for fragment in fragments)
        free = shutil.disk_usage(temporary.parent).free
        raise OSError(
            error.errno,
            f"{error.strerror}: the part of a checkpoint in {temporary.parent} that rank "
            f"{world.rank} writes needs {needed:,} bytes, and the disk has {free:,} left; earlier "
            f"checkpoints are as they were",
        ) from error


def _write_part(
    temporary: Path, fragments: Sequence[Fragment], block_bytes: int, world: Axis, files: Files
) -> Part:
    name = f"rank-{world.rank:05d}.bin"
    tensors: dict[str, TensorEntry] = {}
    sums = Checksums(block_bytes)
    if not temporary.is_dir():
        raise RuntimeError(
            f"rank 0 made {temporary}, which rank {world.rank} cannot see: "
            f"a checkpoint needs a folder that all ranks share"
        )
    with files.create(temporary / name) as file:
        # Wide elements first: then every element lies at a multiple of its size.
        for fragment in sorted(fragments, key=lambda f: -f.data.element_size()):
            places = [place for place in fragment.rectangles if place.area]
            pieces = [Piece(name, sums.size, places)] if places else []
            _merge(tensors, fragment.key, TensorEntry(fragment.shape, fragment.dtype, pieces))
            for block in sums.split(_bytes_of(fragment.data)):
                files.write(file, block)
            fragment.let_go()
        files.fsync(file)
    return Part(name, DataFile(sums.size, sums.blocks), tensors)


def _bytes_of(data: torch.Tensor) -> memoryview:
    return data.detach().cpu().contiguous().view(torch.uint8).numpy().data


def _merge(tensors: dict[str, TensorEntry], key: str, entry: TensorEntry) -> None:
    known = tensors.setdefault(key, TensorEntry(entry.shape, entry.dtype, []))
    if (known.shape, known.dtype) != (entry.shape, entry.dtype):
        raise ValueError(
            f"{key} is {known.dtype} {list(known.shape)} in one fragment and "
            f"{entry.dtype} {list(entry.shape)} in another; they are parts of one tensor"
        )
    known.pieces.extend(entry.pieces)


def _publish(
    folder: Path,
    temporary: Path,
    parts: list[Part],
    meta: dict[str, Any],
    block_bytes: int,
    files: Files,
) -> None:
    manifest = _manifest(parts, meta, block_bytes)
    if lost := wrong_size(temporary, manifest, files):
        raise RuntimeError(f"{lost}: a checkpoint needs a folder that all ranks share")
    with files.create(temporary / NAME) as file:
        files.write(file, memoryview(manifest.to_json().encode()))
        files.fsync(file)
    files.fsync_folder(temporary)
    _replace(folder, temporary, files)


def _manifest(parts: list[Part], meta: dict[str, Any], block_bytes: int) -> Manifest:
    tensors: dict[str, TensorEntry] = {}
    for part in parts:
        for key, entry in part.tensors.items():
            _merge(tensors, key, entry)
    manifest = Manifest(meta, tensors, {part.name: part.file for part in parts}, block_bytes)
    manifest.check()
    return manifest


def _replace(folder: Path, temporary: Path, files: Files) -> None:
    if (folder / NAME).exists():
        # Between the two renames the previous one is found under this name (names.settled).
        files.rename(folder, beside(folder, "old"))
    elif folder.exists():
        discard(folder, files)
    files.rename(temporary, folder)
    files.fsync_folder(folder.parent)
    for old in siblings(folder, "old"):
        discard(old, files)
