from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear

from parallel3d.placement import Replicate
from parallel3d.topology import Axis
from parallel3d.zero.flat import ALIGNMENT, Flat, Held

CPU = torch.device("cpu")


def dp(size: int = 1, rank: int = 0) -> Axis:
    return Axis("dp", size, rank, tuple(range(size)))


def held(*sizes: int, groups: list[int] | None = None) -> list[Held]:
    """Parameters of these many elements, of values 1, 2, 3 and so on."""
    return [
        Held(str(at), nn.Parameter(torch.full((size,), at + 1.0)), Replicate(), at, group)
        for at, (size, group) in enumerate(zip(sizes, groups or [0] * len(sizes), strict=True))
    ]


def flat(
    items: list[Held],
    axis: Axis | None = None,
    dtype: torch.dtype = torch.float32,
    whole: bool = False,
    of: Flat | None = None,
) -> Flat:
    return Flat(items, axis or dp(), CPU, dtype=dtype, stage=0 if whole else 1, of=of)


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 2**16)
)
def test_parameters_and_shards_start_at_multiples_of_64_and_tile_the_buffer(
    sizes: list[int], ranks: int, seed: int
) -> None:
    groups = torch.randint(3, (len(sizes),), generator=torch.Generator().manual_seed(seed)).tolist()
    flats = [flat(held(*sizes, groups=groups), dp(ranks, rank)) for rank in range(ranks)]
    slots = flats[0].slots
    assert all(slot.start % ALIGNMENT == 0 for slot in slots)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(slots))
    assert {slot.held.name: slot.stop - slot.start for slot in slots} == {
        str(at): size for at, size in enumerate(sizes)
    }
    borders = [flat.owned for flat in flats]
    assert borders[0][0] == 0 and borders[-1][1] == len(flats[0].data)
    assert all(a[1] == b[0] and b[0] % ALIGNMENT == 0 for a, b in itertools.pairwise(borders))
    # Padding: less than one border for each parameter and rank.
    assert len(flats[0].data) - sum(sizes) <= ALIGNMENT * (len(sizes) + ranks)


def test_an_optimizer_group_is_one_contiguous_piece_in_model_order() -> None:
    slots = flat(held(5, 6, 7, 8, 9, groups=[1, 0, 1, 0, 1])).slots
    assert [slot.held.name for slot in slots] == ["1", "3", "0", "2", "4"]


def test_parameters_and_gradients_are_views_in_place() -> None:
    weight, bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3))
    before = weight.detach().clone()
    buffer = flat([Held("w", weight, Replicate(), 0, 0), Held("b", bias, Replicate(), 1, 0)])
    assert torch.equal(weight, before)
    buffer.data[:12] = 2.0
    assert (weight == 2).all()
    x = torch.randn(5, 4)
    for _ in range(2):
        linear(x, weight, bias).sum().backward()
    assert torch.equal(buffer.grad[:12].view(3, 4), 2 * x.sum(0).expand(3, 4))
    assert (buffer.grad[64:67] == 10).all()
    assert buffer.grad[12:64].count_nonzero() == buffer.grad[67:].count_nonzero() == 0
    buffer.check()


def test_a_parameter_that_is_not_contiguous_keeps_its_values() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    buffer = flat([Held("w", parameter, Replicate(), 0, 0)])
    assert buffer.data[:6].tolist() == [0, 3, 1, 4, 2, 5]
    assert parameter.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.report("pytorch/pytorch#106395")
def test_bf16_parameters_gather_their_gradients_in_fp32() -> None:
    """512 gradients of 1/256: a running sum in bf16 stalls at 1."""
    parameter = nn.Parameter(torch.ones(1))
    buffer = flat([Held("w", parameter, Replicate(), 0, 0)], dtype=torch.bfloat16)
    assert parameter.dtype == torch.bfloat16 and buffer.grad.dtype == torch.float32
    for _ in range(512):
        (parameter / 256).sum().backward()
    assert buffer.grad[0] == 2.0


@pytest.mark.parametrize("whole", [True, False])
def test_masters_are_the_values_before_they_were_rounded(whole: bool) -> None:
    exact = torch.full((70,), 1.001)
    held_one = Held("w", nn.Parameter(exact.clone()), Replicate(), 0, 0)
    buffer = flat([held_one], dp(2, 0), torch.bfloat16, whole=whole)
    assert torch.equal(held_one.parameter, exact.bfloat16())
    assert torch.equal(buffer.master[: 70 if whole else 64], exact[: 70 if whole else 64])
    assert len(buffer.master) == (128 if whole else 64)
    # Nothing else stays alive with the owned part.
    assert buffer.master.untyped_storage().nbytes() == 4 * len(buffer.master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masters_of_wide_parameters_are_the_parameters(dtype: torch.dtype) -> None:
    buffer = flat(held(100), dp(2, 1), dtype)
    assert buffer.master.data_ptr() == buffer.data[64:].data_ptr()
    assert buffer.grad.dtype == dtype


def test_a_second_use_shares_values_and_has_its_own_gradients() -> None:
    (one,), (two,) = held(3), held(3)
    first = flat([one], dtype=torch.bfloat16)
    second = flat([two], dtype=torch.bfloat16, of=first)
    assert two.parameter.data_ptr() == one.parameter.data_ptr()
    assert second.master is first.master
    assert two.parameter.grad is not None and one.parameter.grad is not None
    assert two.parameter.grad.data_ptr() != one.parameter.grad.data_ptr()


def test_parts_are_what_lies_between_two_borders() -> None:
    buffer = flat(held(70, 3), dp(4, 0))
    found = [(part.held.name, part.start, part.stop) for part in buffer.parts(64, 256)]
    assert found == [("0", 64, 70), ("1", 128, 131)]
    assert buffer.parts(192, 256) == []


@pytest.mark.report("deepspeedai/DeepSpeed#129")
def test_three_elements_on_four_ranks_leave_three_ranks_with_nothing() -> None:
    flats = [flat(held(3), dp(4, rank)) for rank in range(4)]
    assert [len(f.parts(*f.owned)) for f in flats] == [1, 0, 0, 0]
    assert {len(f.master) for f in flats} == {64}


def test_a_gradient_that_was_replaced_is_found() -> None:
    (one,) = held(3)
    buffer = flat([one])
    one.parameter.grad = None
    with pytest.raises(RuntimeError, match="gradient of 0 was replaced or set to None"):
        buffer.check()
    one.parameter.grad = torch.zeros(3)
    with pytest.raises(RuntimeError, match="gradient of 0 was replaced or set to None"):
        buffer.check()


def test_a_parameter_that_was_moved_or_frozen_is_found() -> None:
    (one,) = held(3)
    buffer = flat([one])
    one.parameter.requires_grad_(False)
    with pytest.raises(RuntimeError, match="0 was frozen after the engine was built"):
        buffer.check()
    one.parameter.requires_grad_(True)
    one.parameter.data = torch.zeros(3)
    with pytest.raises(RuntimeError, match="memory of 0 was replaced"):
        buffer.check()
