from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from parallel3d.placement import Placement, Replicate, Shard, cut, placements
from parallel3d.rng import draw_rows, materialise, new_seed, seed_of, seeded
from parallel3d.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLinear,
)
from parallel3d.topology import Axis

Units = list[tuple[str, nn.Module]]


def ranks_of(size: int) -> list[Axis]:
    return [Axis("tp", size, rank, tuple(range(size))) for rank in range(size)]


def test_a_seed_is_the_same_in_every_process_and_version() -> None:
    assert seed_of(0) == 6711488920161924273
    assert seed_of("0.weight", 7) == 4162118445081716069


def test_seeds_tell_numbers_from_texts_and_parts_from_their_joint() -> None:
    parts = [(1,), ("1",), (1, 1), (11,), ("a", "b"), ("ab",), ("b", "a"), (True,), (-1,), ()]
    seeds = {seed_of(*part) for part in parts}
    assert len(seeds) == len(parts) and all(0 <= seed < 2**63 for seed in seeds)


def test_the_default_generator_is_where_it_was_after_a_seeded_block() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with seeded(8):
        inside = torch.rand(2)
    with pytest.raises(KeyError), seeded(9):
        raise KeyError
    assert torch.equal(torch.rand(2), expected)
    with seeded(8):
        assert torch.equal(torch.rand(2), inside)


def test_a_new_seed_follows_the_default_generator_of_the_cpu() -> None:
    torch.manual_seed(3)
    first, second = new_seed(), new_seed()
    torch.manual_seed(3)
    with torch.device("meta"):
        assert (new_seed(), new_seed()) == (first, second) and first != second


# Cuts of one whole drawing


@st.composite
def drawings(draw: st.DrawFn) -> tuple[Placement, tuple[int, ...], int]:
    size = draw(st.integers(1, 4))
    if draw(st.booleans()):
        cols = size * draw(st.integers(1, 3))
        return Shard(1, (cols,)), (draw(st.integers(1, 200)), cols), size
    blocks = tuple(draw(st.lists(st.integers(1, 150), min_size=1, max_size=3)))
    return Shard(0, blocks), (sum(blocks), 3) if draw(st.booleans()) else (sum(blocks),), size


@given(drawings())
def test_any_cut_draws_the_bits_of_the_whole(
    drawing: tuple[Placement, tuple[int, ...], int],
) -> None:
    placement, shape, size = drawing
    whole = torch.empty(shape)
    draw_rows(whole, Replicate(), Axis.single(), 5, Tensor.normal_)
    for axis in ranks_of(size):
        local = cut(torch.full(shape, torch.nan), placement, axis)
        draw_rows(local, placement, axis, 5, Tensor.normal_)
        assert torch.equal(local, cut(whole, placement, axis))


def test_a_rank_draws_only_the_blocks_it_holds_rows_of() -> None:
    drawn: list[int] = []

    def count(rows: Tensor) -> None:
        assert rows.dtype == torch.float32 and rows.is_contiguous()
        drawn.append(len(rows))
        rows.normal_()

    local = torch.empty(100, 2, dtype=torch.bfloat16)
    draw_rows(local, Shard(0, (400,)), ranks_of(4)[2], 1, count)
    assert drawn == [64, 64], "rows 200..299 lie in blocks 3 and 4 of 64 rows"
    whole = torch.empty(400, 2)
    draw_rows(whole, Replicate(), Axis.single(), 1, Tensor.normal_)
    assert torch.equal(local, whole[200:300].bfloat16()), "cast after drawing"
    assert len(whole.unique()) == 800


# Models on meta


def model(axis: Axis, blocks: int = 4) -> nn.Sequential:
    """Built on meta: embedding, equal blocks, head."""
    with torch.device("meta"):
        return nn.Sequential(
            VocabParallelEmbedding(11, 8, axis=axis),
            *[
                nn.Sequential(
                    nn.LayerNorm(8),
                    ColumnParallelLinear(8, 12, axis=axis, blocks=3),
                    RowParallelLinear(12, 8, axis=axis),
                    nn.Linear(8, 8),
                )
                for _ in range(blocks)
            ],
            VocabParallelLinear(8, 11, axis=axis),
        )


def units(module: nn.Sequential) -> Units:
    return list(module.named_children())


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


@pytest.mark.report("pytorch/pytorch#139304")
@pytest.mark.report("pytorch/torchtitan#514")
def test_equal_blocks_differ_and_are_the_same_wherever_they_are_made() -> None:
    whole = model(Axis.single())
    materialise(units(whole), seed=0)
    weights = [block[3].weight for block in whole[1:-1]]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    for num_stages in (2, 3, 6):
        parts = model(Axis.single())
        every = units(parts)
        for stage in reversed(range(num_stages)):
            materialise(every[stage * 6 // num_stages : (stage + 1) * 6 // num_stages], seed=0)
        assert all(torch.equal(v, values(parts)[n]) for n, v in values(whole).items())
    other = model(Axis.single())
    materialise(units(other), seed=1)
    assert not torch.equal(other[1][3].weight, whole[1][3].weight), "another seed, other bits"


@pytest.mark.report("allenai/OLMo-core#319")
def test_every_replica_and_every_cut_starts_from_the_same_whole_model() -> None:
    whole = model(Axis.single())
    materialise(units(whole), seed=0)
    for size in (2, 4):
        for axis in ranks_of(size):
            for replica in range(2):
                torch.manual_seed(100 * replica + axis.rank)
                local = model(axis)
                materialise(units(local), seed=0)
                for name, placement in placements(local).items():
                    expected = cut(whole.get_parameter(name), placement, axis)
                    assert torch.equal(local.get_parameter(name), expected), name


def test_ties_stay_tied_within_and_between_units_and_are_drawn_under_their_first_name() -> None:
    with torch.device("meta"):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        shared = nn.LayerNorm(4)
        built = nn.Sequential(nn.Sequential(first, second, shared), nn.Sequential(shared))
        third = nn.Linear(4, 4)
        third.weight = first.weight
        built.append(third)
    materialise(units(built), seed=0)
    assert first.weight is second.weight is third.weight
    assert built[0][2] is built[1][0] and torch.equal(shared.weight, torch.ones(4))
    with torch.device("meta"):
        alone = nn.Linear(4, 4)
    materialise([("0.0", alone)], seed=0)
    assert torch.equal(alone.weight, first.weight) and torch.equal(alone.bias, first.bias)
    assert not torch.equal(second.bias, first.bias) and not torch.equal(third.bias, first.bias)


def test_tensors_on_a_real_device_and_the_default_generator_are_left_alone() -> None:
    real = nn.Linear(2, 2)
    kept = real.weight.detach().clone()
    with torch.device("meta"):
        frozen = nn.Linear(2, 2).requires_grad_(False)
        norm = nn.BatchNorm1d(2)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    materialise([("a", real), ("b", frozen), ("c", norm)], seed=0)
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(real.weight, kept)
    assert not frozen.weight.is_meta and not frozen.weight.requires_grad
    assert norm.running_var is not None and torch.equal(norm.running_var, torch.ones(2))


class Scale(nn.Module):
    """Owns a parameter and cannot fill it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("count", torch.empty(2, dtype=torch.int64))


def test_a_module_that_cannot_fill_its_own_tensors_is_named() -> None:
    with torch.device("meta"):
        unit = nn.Sequential(nn.ReLU(), Scale())
    with pytest.raises(ValueError, match=re.escape("3.1 (Scale) has parameters or buffers on me")):
        materialise([("3", unit)], seed=0)
    with torch.device("meta"):
        unit = nn.Sequential(nn.ReLU(), Scale())
    materialise([("3", unit)], seed=0, check=False)
    assert unit[1].scale.shape == (3,) and not unit[1].scale.is_meta
    assert unit[1].count.dtype == torch.int64


def test_what_is_drawn_is_contiguous_rows_of_the_whole_in_order() -> None:
    whole, seen = torch.zeros(130, 2), []
    draw_rows(whole, Replicate(), Axis.single(), 0, lambda rows: seen.append(rows.fill_(len(seen))))
    assert whole[:, 0].tolist() == [0.0] * 64 + [1.0] * 64 + [2.0] * 2
