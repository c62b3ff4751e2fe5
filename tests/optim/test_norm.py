"""Norm and clipping with the ranks of a world played one after another: an all-reduce is a sum."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from parallel3d.optim.norm import NormSlots, clip, clip_coefficient
from parallel3d.placement import Placement, Replicate, Shard, cut
from parallel3d.topology import Axis, Grid
from parallel3d.zero.flat import Flat, Held

CPU = torch.device("cpu")
# (whole gradient, placement, stage) by parameter, in model order.
Model = list[tuple[Tensor, Placement, int]]


def axes(grid: Grid, rank: int) -> tuple[Axis, Axis, Axis]:
    pp, dp, tp = (
        Axis(name, getattr(grid, name), at, tuple(range(getattr(grid, name))))
        for name, at in zip(("pp", "dp", "tp"), grid.coordinates(rank), strict=True)
    )
    return pp, dp, tp


def ranks(model: Model, grid: Grid, zero: int = 1) -> Iterator[tuple[NormSlots, list[Flat]]]:
    """Each rank's slots and flat buffers, of one unit for each stage, filled with gradients."""
    for rank in range(grid.size):
        pp, dp, tp = axes(grid, rank)
        flats = []
        for stage in range(8):
            here = [(i, *one[:2]) for i, one in enumerate(model) if one[2] == stage]
            if not here or stage % grid.pp != pp.rank:
                continue
            items = [
                Held(str(i), nn.Parameter(torch.zeros_like(cut(g, place, tp))), place, i, 0)
                for i, g, place in here
            ]
            flats.append(Flat(items, dp, CPU, dtype=items[0].parameter.dtype, stage=zero))
            for item, (_, gradient, place) in zip(items, here, strict=True):
                assert item.parameter.grad is not None
                item.parameter.grad.copy_(cut(gradient, place, tp))
        placements = {i: place for i, (_, place, _) in enumerate(model)}
        yield NormSlots(placements, flats, tp, dp), flats


def slots(model: Model, grid: Grid, zero: int = 1) -> Tensor:
    """What the all-reduce gives every rank."""
    total = torch.zeros(0)
    for mine, _ in ranks(model, grid, zero):
        out = torch.zeros(mine.count, dtype=torch.float64)
        mine.squares(out)
        total = out if not len(total) else total + out
    return total


def norm(model: Model, grid: Grid, zero: int = 1) -> float:
    return math.sqrt(slots(model, grid, zero).sum().item())


def drawn(dtype: torch.dtype = torch.float32) -> Model:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return [
        (draw(20, 16), Shard(0, (20,)), 0),
        (draw(16), Replicate(), 0),
        (draw(16, 24), Shard(1, (24,)), 0),
        (draw(30, 16), Shard(0, (12, 18)), 1),
        (draw(300), Replicate(), 1),
        (draw(3), Replicate(), 1),
    ]


@pytest.mark.report("NVIDIA-NeMo/RL#3788")
@pytest.mark.report("ROCm/TransformerEngine#715")
@pytest.mark.parametrize("grid", ["1x1x2", "2x2x2", "2x2x1", "1x4x2"])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_replicated_parameter_counts_once(grid: str, zero: int) -> None:
    """Shards [3] and [4], replicated [12]: 13; counted twice it would be 17.69."""
    model: Model = [
        (torch.tensor([3.0, 4.0]), Shard(0, (2,)), 0),
        (torch.tensor([12.0]), Replicate(), 1),
    ]
    assert norm(model, Grid.parse(grid), zero) == 13.0


@pytest.mark.report("pytorch/pytorch#170862")
@pytest.mark.parametrize("zero", [0, 1])
def test_dp_shards_add_up_to_the_norm_and_are_clipped_alike(zero: int) -> None:
    model: Model = [(torch.tensor([value]), Replicate(), 0) for value in (1.0, 2.0, 2.0, 4.0)]
    total, gradients = slots(model, Grid(dp=4), zero), []
    for _, flats in ranks(model, Grid(dp=4), zero):
        clip(flats, clip_coefficient(math.sqrt(total.sum().item()), 1.0))
        gradients += [flat.updated_grad for flat in flats]
    assert math.sqrt(total.sum().item()) == 5.0
    values = torch.cat(gradients)
    values = values[values > 0][:4]
    assert torch.allclose(values, torch.tensor([0.2, 0.4, 0.4, 0.8]))


@pytest.mark.report("ByteDance-Seed/VeOmni#184")
@pytest.mark.report("facebookresearch/fairscale#517")
@pytest.mark.parametrize("grid", ["1x1x1", "2x1x1", "1x4x1", "1x1x3", "2x2x2", "1x2x2", "1x3x4"])
def test_every_layout_gives_the_norm_of_the_whole_gradients(grid: str) -> None:
    model = drawn(torch.float64)
    expected = torch.cat([gradient.flatten() for gradient, _, _ in model]).norm().item()
    assert norm(model, Grid.parse(grid)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (3, 2)])
def test_slots_have_the_same_bits_at_every_pp_and_zero_stage(dp: int, tp: int) -> None:
    first = slots(drawn(), Grid(1, dp, tp))
    for pp in (1, 2):
        for zero in (0, 1):
            assert torch.equal(slots(drawn(), Grid(pp, dp, tp), zero), first)


def test_each_slot_is_written_by_one_rank() -> None:
    written = torch.zeros(slots(drawn(), Grid(2, 2, 2)).numel(), dtype=torch.int64)
    for mine, _ in ranks(drawn(), Grid(2, 2, 2)):
        out = torch.zeros(mine.count, dtype=torch.float64)
        mine.squares(out)
        written += out != 0
    # Slots of parts that are all padding are written by nobody.
    assert written.max() == 1


@pytest.mark.report("ecmwf/WeatherGenerator#2724")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("parameter", [0, 1])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_one_rank_whose_copy_is_not_finite_is_seen_by_all(
    value: float, parameter: int, tp_rank: int
) -> None:
    """Also in a replicated parameter, of which tp rank 0 writes the slot."""
    total = torch.zeros(1)
    for rank, (mine, flats) in enumerate(ranks(drawn(), Grid(tp=2))):
        if rank == tp_rank:
            grad = flats[0].slots[parameter].held.parameter.grad
            assert grad is not None
            grad.view(-1)[-1] = value
        out = torch.zeros(mine.count, dtype=torch.float64)
        mine.squares(out)
        total = total + out.sum()
    assert not math.isfinite(total.item())


def test_a_rank_with_nothing_writes_nothing() -> None:
    mine = NormSlots({0: Replicate()}, [], Axis.single("tp"), Axis.single("dp"))
    out = torch.zeros(1, dtype=torch.float64)
    mine.squares(out)
    assert out == 0


def test_clipping_equals_torchs() -> None:
    (gradient, *_), *_ = drawn()
    parameter = nn.Parameter(gradient.clone())
    parameter.grad = gradient.clone()
    total = nn.utils.clip_grad_norm_([parameter], 0.5).item()
    assert clip_coefficient(total, 0.5) == pytest.approx(0.5 / (total + 1e-6), rel=1e-15)
    for _, flats in ranks([(gradient, Replicate(), 0)], Grid()):
        clip(flats, clip_coefficient(total, 0.5))
        assert torch.allclose(flats[0].grad[:320].view(20, 16), parameter.grad, rtol=1e-6)


@pytest.mark.parametrize(("total", "limit"), [(0.5, 1.0), (100.0, None), (0.0, 1.0)])
def test_gradients_below_the_limit_keep_their_bits(total: float, limit: float | None) -> None:
    assert clip_coefficient(total, limit) == 1.0
    for _, flats in ranks(drawn(), Grid()):
        before = flats[0].grad.clone()
        clip(flats, clip_coefficient(total, limit))
        assert torch.equal(flats[0].grad, before)


def test_a_rank_with_nothing_to_train_has_nothing_to_clip() -> None:
    clip([], 0.5)
