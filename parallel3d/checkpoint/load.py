"""Fill a rank's fragments from a checkpoint that any layout may have written."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..comm.collectives import all_gather_objects
from ..placement import Rectangle
from ..topology import Axis
from .agree import agree, on_rank_0
from .cover import meetings
from .damage import damage, wrong_size
from .files import LOCAL, Files
from .fragment import DTYPES, Fragment
from .manifest import Manifest, TensorEntry, read_manifest
from .names import settled

WAY_OUT = "load another checkpoint"


class Differences(NamedTuple):
    """How a checkpoint and the fragments of all ranks differ; the same on every rank.

    ``missing`` keys are wanted and not saved, ``unexpected`` ones saved and not wanted; ``shapes``
    and ``dtypes`` are lines that name a key, what is saved and what is wanted.
    """

    missing: list[str]
    unexpected: list[str]
    shapes: list[str]
    dtypes: list[str]

    def __str__(self) -> str:
        parts = [f"{kind}: {', '.join(names)}" for kind, names in self._asdict().items() if names]
        return "; ".join(parts)


def load(
    folder: Path,
    fragments: Sequence[Fragment],
    world: Axis,
    strict: bool = True,
    files: Files = LOCAL,
    *,
    convert: bool = False,
    verify: bool = True,
    subset: bool = False,
) -> dict[str, Any]:
    """Fill ``data`` of every rank's fragments in place and return the saved ``meta``. Collective.

    Fragments say what a rank wants; ranks may want the same elements. A rank reads those, and to
    ``verify`` checksums its equal share of all data files: about twice its own share in all.

    Moves   the manifest to every rank, and each rank's keys; no tensor data.

    With ``strict``, keys, shapes and dtypes must be the same on both sides; ``convert`` allows
    other dtypes, ``subset`` saved keys that no fragment wants. Without ``strict``, a missing key
    leaves its fragment as it is, an unexpected one is left out, values are converted to the
    fragment's dtype, and rank 0 warns with the names; another shape is an error still.

    Raises on every rank before anything is filled: ValueError that lists the differences,
    RuntimeError that names a missing, truncated or corrupt file.
    """
    folder, manifest = on_rank_0(world, lambda: _open(folder, files))
    found = _compare(manifest, fragments, world)
    if convert:
        found = found._replace(dtypes=[])
    if subset:
        found = found._replace(unexpected=[])
    _settle(folder, found, strict, world)
    if lost := _unsound(folder, manifest, world, files, verify):
        raise RuntimeError(f"{lost}; {WAY_OUT}")
    agree(world, lambda: _fill(folder, manifest, fragments, files))
    return manifest.meta


def differences(
    folder: Path, fragments: Sequence[Fragment], world: Axis, files: Files = LOCAL
) -> Differences:
    """What ``load`` would complain about. Collective; reads the manifest only."""
    _, manifest = on_rank_0(world, lambda: _open(folder, files))
    return _compare(manifest, fragments, world)


def read_meta(folder: Path, world: Axis, files: Files = LOCAL) -> dict[str, Any]:
    """The ``meta`` a checkpoint was saved with, on every rank. Collective."""
    _, manifest = on_rank_0(world, lambda: _open(folder, files))
    return manifest.meta


def _open(folder: Path, files: Files) -> tuple[Path, Manifest]:
    folder = settled(folder)
    try:
        return folder, read_manifest(folder, files)
    except RuntimeError as error:
        raise RuntimeError(f"{error}; {WAY_OUT}") from error


def _compare(manifest: Manifest, fragments: Sequence[Fragment], world: Axis) -> Differences:
    wanted = {(f.key, f.shape, f.dtype) for f in fragments}
    wanted = set().union(*all_gather_objects(wanted, world))
    keys = {key for key, _, _ in wanted}
    shapes, dtypes = [], []
    for key, shape, dtype in sorted(wanted):
        if (saved := manifest.tensors.get(key)) is None:
            continue
        if saved.shape != shape:
            shapes.append(f"{key} is saved as {list(saved.shape)} and wanted as {list(shape)}")
        if saved.dtype != dtype:
            dtypes.append(f"{key} is saved as {saved.dtype} and wanted as {dtype}")
    saved_keys = manifest.tensors.keys()
    return Differences(sorted(keys - saved_keys), sorted(saved_keys - keys), shapes, dtypes)


def _settle(folder: Path, found: Differences, strict: bool, world: Axis) -> None:
    if found.shapes or (strict and any(found)):
        raise ValueError(
            f"checkpoint {folder} does not fit the model: {found}: build the model that it was "
            f"saved of, with the same sizes, ties and optimizer"
        )
    if any(found) and world.rank == 0:
        warnings.warn(f"loading what fits of checkpoint {folder}: {found}", stacklevel=3)


def _unsound(
    folder: Path, manifest: Manifest, world: Axis, files: Files, verify: bool
) -> str | None:
    if verify:
        return damage(folder, manifest, world, files)
    # Sizes always: a mapped file that is too short ends the process without a word.
    found = all_gather_objects(wrong_size(folder, manifest, files), world)
    return next((text for text in found if text), None)


def _fill(folder: Path, manifest: Manifest, fragments: Sequence[Fragment], files: Files) -> None:
    maps: dict[str, np.ndarray] = {}
    for fragment in fragments:
        entry = manifest.tensors.get(fragment.key)
        if entry is None or fragment.data.numel() == 0:
            continue
        for piece in entry.pieces:
            if piece.file not in maps:
                maps[piece.file] = files.map(folder / piece.file)
        _fill_fragment(fragment, entry, maps, files)
        fragment.let_go()


def _fill_fragment(
    fragment: Fragment, entry: TensorEntry, maps: dict[str, np.ndarray], files: Files
) -> None:
    dtype = DTYPES[entry.dtype]
    data = fragment.data.detach()
    direct = data.device.type == "cpu" and data.dtype == dtype and data.is_contiguous()
    buffer = data if direct else torch.empty(data.numel(), dtype=dtype)
    target = buffer.view(torch.uint8).numpy().view(f"u{entry.itemsize}")
    sources, places = _sources(entry, maps)
    start = filled = 0
    for wanted in fragment.rectangles:
        into = target[start : start + wanted.area].reshape(wanted.rows, wanted.cols)
        for index, part in meetings(wanted, places):
            saved = Rectangle(*places[index].tolist())
            files.copy(_window(sources[index], saved, part), _window(into, wanted, part))
            filled += part.area
        start += wanted.area
    assert filled == start, fragment.key  # the manifest covers every element exactly once
    if not direct:
        data.copy_(buffer)


def _sources(
    entry: TensorEntry, maps: dict[str, np.ndarray]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Every saved rectangle as a mapped matrix, and their places [n, 4]."""
    sources, places = [], []
    for piece in entry.pieces:
        start = piece.offset
        for place in piece.rectangles:
            stop = start + place.area * entry.itemsize
            matrix = maps[piece.file][start:stop].view(f"u{entry.itemsize}")
            sources.append(matrix.reshape(place.rows, place.cols))
            places.append(place)
            start = stop
    return sources, np.array(places, dtype=np.int64).reshape(-1, 4)


def _window(matrix: np.ndarray, place: Rectangle, part: Rectangle) -> np.ndarray:
    """The part of a tensor, out of the matrix that lies at ``place`` of it."""
    row, col = part.row - place.row, part.col - place.col
    return matrix[row : row + part.rows, col : col + part.cols]
