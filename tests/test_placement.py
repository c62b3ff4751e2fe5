from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parallel3d.placement import (
    Piece,
    Placement,
    Rectangle,
    Replicate,
    Shard,
    assemble,
    cut,
    placements,
    rectangles,
    view_2d,
    whole_shape,
)
from parallel3d.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLinear,
)
from parallel3d.topology import Axis


def ranks_of(size: int) -> list[Axis]:
    return [Axis("tp", size, rank, tuple(range(size))) for rank in range(size)]


@st.composite
def cuttings(draw: st.DrawFn) -> tuple[Placement, tuple[int, ...], int]:
    """A placement, the whole shape it may be used on, and a number of ranks."""
    size = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(("whole", "rows", "columns", "vector")))
    if kind == "whole":
        shapes = st.lists(st.integers(1, 5), max_size=3)
        return Replicate(), tuple(draw(shapes)), size
    if kind == "columns":
        cols = size * draw(st.integers(1, 4))
        return Shard(1, (cols,)), (draw(st.integers(1, 5)), cols), size
    blocks = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    rest = () if kind == "vector" else tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    return Shard(0, blocks), (sum(blocks), *rest), size


@given(cuttings())
def test_the_parts_of_all_ranks_are_the_whole_and_zero_padding(
    cutting: tuple[Placement, tuple[int, ...], int],
) -> None:
    placement, shape, size = cutting
    whole = torch.arange(1, prod(shape) + 1).view(shape)
    parts = [cut(whole, placement, axis) for axis in ranks_of(size)]
    assert len({tuple(part.shape) for part in parts}) == 1, "every rank's part has one shape"
    assert whole_shape(placement, tuple(parts[0].shape)) == shape
    if isinstance(placement, Replicate) or size == 1:
        assert all(part is whole for part in parts)
        return
    found = torch.cat([part.flatten() for part in parts])
    assert sorted(found[found > 0].tolist()) == list(range(1, whole.numel() + 1))


@given(cuttings(), st.data())
def test_rectangles_say_where_each_local_element_lies_in_the_whole(
    cutting: tuple[Placement, tuple[int, ...], int], data: st.DataObject
) -> None:
    placement, shape, size = cutting
    whole = torch.arange(1, prod(shape) + 1).view(shape)
    flat = whole.view(view_2d(shape))
    for axis in ranks_of(size):
        part = cut(whole, placement, axis)
        local = part.reshape(-1)
        start = data.draw(st.integers(0, local.numel()))
        stop = data.draw(st.integers(start, local.numel()))
        rebuilt = torch.zeros(stop - start, dtype=whole.dtype)
        for at, (row, col, rows, cols) in rectangles(
            placement, tuple(part.shape), axis, start, stop
        ):
            assert rows > 0 and cols > 0 and not rebuilt[at : at + rows * cols].any(), "met once"
            rebuilt[at : at + rows * cols] = flat[row : row + rows, col : col + cols].reshape(-1)
        assert torch.equal(rebuilt, local[start:stop]), "padding, zero, is in none"


@given(cuttings())
def test_a_whole_is_assembled_from_the_rectangles_of_all_ranks(
    cutting: tuple[Placement, tuple[int, ...], int],
) -> None:
    placement, shape, size = cutting
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    parts = []
    for axis in ranks_of(size):
        part = cut(whole, placement, axis)
        local = part.reshape(-1)
        for at, place in rectangles(placement, tuple(part.shape), axis, 0, local.numel()):
            parts.append((place, local[at : at + place.area]))
    assert torch.equal(assemble(shape, whole.dtype, parts), whole)


def test_fused_blocks_are_each_cut_for_themselves() -> None:
    grouped = Shard(0, (8, 4, 4))
    assert grouped.chunks(2) == [4, 2, 2]
    assert grouped.pieces(2, 1) == [Piece(0, 4, 4), Piece(4, 10, 2), Piece(6, 14, 2)]
    whole = torch.arange(16)
    assert cut(whole, grouped, ranks_of(2)[1]).tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


def test_the_last_ranks_are_padded_and_one_may_hold_padding_alone() -> None:
    vocabulary = Shard(0, (5,))
    assert [vocabulary.pieces(4, rank)[0] for rank in range(4)] == [
        Piece(0, 0, 2),
        Piece(0, 2, 2),
        Piece(0, 4, 1),
        Piece(0, 5, 0),
    ]
    assert cut(torch.ones(5), vocabulary, ranks_of(4)[3]).tolist() == [0, 0]
    assert rectangles(vocabulary, (2,), ranks_of(4)[2], 0, 2) == [(0, Rectangle(4, 0, 1, 1))]


@pytest.mark.parametrize("size", [1, 2])
def test_every_parameter_has_a_placement_and_only_parallel_layers_cut_theirs(size: int) -> None:
    axis = ranks_of(size)[-1]
    head = VocabParallelLinear(4, 7, axis=axis)
    embedding = VocabParallelEmbedding(7, 4, axis=axis)
    head.weight = embedding.weight
    norm = nn.LayerNorm(4)
    model = nn.Sequential(
        embedding,
        norm,
        nn.Sequential(
            ColumnParallelLinear(4, 12, axis=axis, blocks=3),
            RowParallelLinear(12, 4, axis=axis),
        ),
        head,
        norm,
    )
    cuts = {
        "0.weight": Shard(0, (7,)),
        "2.0.weight": Shard(0, (4, 4, 4)),
        "2.0.bias": Shard(0, (4, 4, 4)),
        "2.1.weight": Shard(1, (12,)),
        "3.weight": Shard(0, (7,)),
    }
    found = placements(model)
    assert set(found) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert {"3.weight", "4.weight"} <= set(found), "ties have a placement in each of their places"
    expected = cuts if size > 1 else {}
    assert {n: p for n, p in found.items() if p != Replicate()} == expected
    assert placements(nn.Linear(2, 2)) == {"weight": Replicate(), "bias": Replicate()}
