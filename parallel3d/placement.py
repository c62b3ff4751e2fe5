"""How a parameter lies on the ``tp`` axis, and the way between the whole tensor and a rank's part.

Whole tensors are addressed through their 2-D view ``(shape[0], prod(shape[1:]))``; a contiguous
slice of a rank's local tensor is a list of rectangles of that view, which is all that a checkpoint
for any layout needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .topology import Axis


@dataclass(frozen=True)
class Replicate:
    """The whole tensor on every rank of the axis."""


@dataclass(frozen=True)
class Shard:
    """Cut along ``dim``: each of the fused ``blocks`` (their whole sizes) into equal chunks.

    A block of ``b`` on ``size`` ranks gives chunks of ``ceil(b / size)``; the last chunks are
    padded where it does not divide. ``dim`` is 0, or 1 for one block.
    """

    dim: int
    blocks: tuple[int, ...]

    def chunks(self, size: int) -> list[int]:
        """Local size of each block, the same on every rank."""
        return [-(-block // size) for block in self.blocks]

    def pieces(self, size: int, rank: int) -> list[Piece]:
        """What this rank holds, block by block; padding belongs to no piece."""
        pieces, local, whole = [], 0, 0
        for block, chunk in zip(self.blocks, self.chunks(size), strict=True):
            start = min(rank * chunk, block)
            pieces.append(Piece(local, whole + start, min(chunk, block - start)))
            local, whole = local + chunk, whole + block
        return pieces


Placement = Replicate | Shard


class Piece(NamedTuple):
    """``length`` consecutive indices along a cut dim: where locally, where in the whole."""

    local: int
    whole: int
    length: int


class Rectangle(NamedTuple):
    """Part of the 2-D view of a whole tensor."""

    row: int
    col: int
    rows: int
    cols: int

    @property
    def area(self) -> int:
        """Number of elements."""
        return self.rows * self.cols


def placements(module: nn.Module) -> dict[str, Placement]:
    """The placement of every parameter by name; plain modules replicate theirs.

    A parallel layer says how its own lie, by ``placements()``, unless its ``axis`` has size 1.
    """
    found: dict[str, Placement] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        is_cut = hasattr(child, "placements") and child.axis.size > 1
        declared = child.placements() if is_cut else {}
        for name in child._parameters:
            full = f"{prefix}.{name}" if prefix else name
            found[full] = declared.get(name, Replicate())
    return found


def view_2d(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the 2-D view of a tensor of this shape."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def whole_shape(placement: Placement, local: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the whole tensor, from a rank's part."""
    if isinstance(placement, Replicate):
        return tuple(local)
    dim = placement.dim
    return (*local[:dim], sum(placement.blocks), *local[dim + 1 :])


def cut(whole: Tensor, placement: Placement, axis: Axis) -> Tensor:
    """This rank's part of a whole tensor; padding is zero. A new tensor, or ``whole`` itself."""
    if isinstance(placement, Replicate) or axis.size == 1:
        return whole
    shape = list(whole.shape)
    shape[placement.dim] = sum(placement.chunks(axis.size))
    local = whole.new_zeros(shape)
    for piece in placement.pieces(axis.size, axis.rank):
        source = whole.narrow(placement.dim, piece.whole, piece.length)
        local.narrow(placement.dim, piece.local, piece.length).copy_(source)
    return local


def rectangles(
    placement: Placement, shape: tuple[int, ...], axis: Axis, start: int, stop: int
) -> list[tuple[int, Rectangle]]:
    """Elements ``start..stop`` of the flat local tensor, as rectangles of the whole one.

    ``shape`` is the local shape. Returns ``(offset, rectangle)`` pairs: the rectangle's elements
    lie row-major from ``offset`` on, counted from ``start``. Padding appears in none.
    """
    rows, cols = view_2d(shape)
    found = []
    for row, col, num_rows, num_cols in _bands(start, stop, cols):
        offset = row * cols + col - start
        for piece in pieces_along(placement, axis, 0, rows):
            low = max(row, piece.local)
            count = min(row + num_rows, piece.local + piece.length) - low
            for span in pieces_along(placement, axis, 1, cols):
                left = max(col, span.local)
                width = min(col + num_cols, span.local + span.length) - left
                if count > 0 and width > 0:
                    at = offset + (low - row) * num_cols + (left - col)
                    place = (piece.whole + low - piece.local, span.whole + left - span.local)
                    found.append((at, Rectangle(*place, count, width)))
    return found


def pieces_along(placement: Placement, axis: Axis, dim: int, length: int) -> list[Piece]:
    """What this rank holds along a dim of the 2-D view: all of it, or its pieces of a cut dim."""
    if isinstance(placement, Shard) and placement.dim == dim:
        pieces = placement.pieces(axis.size, axis.rank)
        full = pieces[0].length * axis.size == placement.blocks[0]
        assert dim == 0 or (len(pieces) == 1 and full), "blocks or padding along dim 1"
        return pieces
    return [Piece(0, 0, length)]


def _bands(start: int, stop: int, cols: int) -> list[tuple[int, int, int, int]]:
    """A flat interval of a row-major matrix as at most a part row, whole rows and a part row."""
    bands = []
    while start < stop:
        row, col = divmod(start, cols)
        if col or stop - start < cols:
            width = min(cols - col, stop - start)
            bands.append((row, col, 1, width))
            start += width
        else:
            count = (stop - start) // cols
            bands.append((row, 0, count, cols))
            start += count * cols
    return bands


def assemble(
    shape: tuple[int, ...], dtype: torch.dtype, parts: list[tuple[Rectangle, Tensor]]
) -> Tensor:
    """The whole tensor of ``shape`` from flat parts that cover it."""
    whole = torch.empty(shape, dtype=dtype)
    flat = whole.view(view_2d(shape))
    for place, data in parts:
        target = flat[place.row : place.row + place.rows, place.col : place.col + place.cols]
        target.copy_(data.view(place.rows, place.cols))
    return whole
