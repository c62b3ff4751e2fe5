"""Whole tensors on rank 0, from the fragments of every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..checkpoint.fragment import Fragment
from ..comm.collectives import all_gather_objects, gather_objects
from ..placement import Rectangle, assemble
from ..topology import Axis

BATCH = 2**26  # bytes of whole tensors that travel in one message


def join(fragments: list[Fragment], world: Axis) -> dict[str, Tensor]:
    """By name, the key without its kind; elsewhere than on rank 0 {}. Collective.

    Small tensors travel together. Only rank 0 ever holds more than a batch beside its own part.
    """
    sizes: dict[str, int] = {}
    mine = {f.key: torch.Size(f.shape).numel() * f.data.element_size() for f in fragments}
    for sizes_of_rank in all_gather_objects(mine, world):
        sizes |= sizes_of_rank
    whole: dict[str, Tensor] = {}
    for keys in _batches(sizes):
        shapes: dict[str, tuple[int, ...]] = {}
        placed: dict[str, list[tuple[Rectangle, Tensor]]] = {}
        message = _pack([fragment for fragment in fragments if fragment.key in keys])
        for pieces, data in gather_objects(message, world):
            for key, shape, place, part in _unpack(pieces, data):
                shapes[key] = shape
                placed.setdefault(key, []).append((place, part))
        for key, parts in placed.items():
            whole[key.split("/", 1)[1]] = assemble(shapes[key], parts[0][1].dtype, parts)
    return whole


Packed = tuple[str, tuple[int, ...], Rectangle, torch.dtype]


def _pack(fragments: list[Fragment]) -> tuple[list[Packed], Tensor]:
    """What the fragments are, and all their bytes."""
    pieces = [(f.key, f.shape, f.rectangles[0], f.data.dtype) for f in fragments]
    data = [f.data.cpu().contiguous().view(torch.uint8) for f in fragments]
    joined = torch.cat(data) if data else torch.empty(0, dtype=torch.uint8)
    for fragment in fragments:
        fragment.let_go()
    return pieces, joined


def _unpack(
    pieces: list[Packed], data: Tensor
) -> Iterator[tuple[str, tuple[int, ...], Rectangle, Tensor]]:
    parts = data.split([place.area * dtype.itemsize for _, _, place, dtype in pieces])
    for (key, shape, place, dtype), part in zip(pieces, parts, strict=True):
        yield key, shape, place, part.clone().view(dtype)  # cloned: a view wants alignment


def _batches(sizes: dict[str, int]) -> Iterator[set[str]]:
    """Keys in order, in batches of at most BATCH bytes; a larger tensor travels alone."""
    batch: set[str] = set()
    for key in sorted(sizes):
        if batch and sum(sizes[other] for other in batch) + sizes[key] > BATCH:
            yield batch
            batch = set()
        batch.add(key)
    if batch:
        yield batch
