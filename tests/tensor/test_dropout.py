from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from parallel3d.rng import seed_of
from parallel3d.tensor import Dropout
from parallel3d.topology import Axis, Grid

GRID = Grid(dp=2, tp=2)
Masks = dict[tuple[int, int], Tensor]


def axis_of(rank: int) -> Axis:
    return Axis("tp", 2, rank, (0, 1))


def masks(cut: bool, step: int = 0) -> Masks:
    """By (dp, tp) coordinate, under a key that has the replica's share of the batch in it."""
    found = {}
    for rank in range(GRID.size):
        _, dp, tp = GRID.coordinates(rank)
        torch.manual_seed(seed_of(0, step, dp))
        layer = Dropout(0.5, axis=axis_of(tp) if cut else None)
        found[dp, tp] = layer(torch.ones(64))
    return found


@pytest.mark.report("tenstorrent/tt-metal#55947")
@pytest.mark.report("NVIDIA/Megatron-LM#26")
@pytest.mark.report("NVIDIA/Megatron-LM#1256")
def test_masks_are_equal_over_tp_where_the_activation_is_whole_and_differ_where_it_is_cut() -> None:
    whole, cut = masks(cut=False), masks(cut=True)
    for dp in range(2):
        assert torch.equal(whole[dp, 0], whole[dp, 1])
        assert not torch.equal(cut[dp, 0], cut[dp, 1])
    for tp in range(2):
        assert not torch.equal(whole[0, tp], whole[1, tp])
        assert not torch.equal(cut[0, tp], cut[1, tp])
    assert not torch.equal(whole[0, 0], masks(cut=False, step=1)[0, 0])


@pytest.mark.report("NVIDIA/Megatron-LM#206")
def test_draws_of_a_loader_on_one_rank_do_not_move_the_masks() -> None:
    rows = range(4)
    for epoch in range(2):
        for step in range(5):
            seen = []
            for tp in range(2):
                if tp == 0:  # it alone loads; a loader draws its workers' seed from the generator
                    list(DataLoader(rows, shuffle=True))  # type: ignore[arg-type]
                torch.manual_seed(seed_of(0, 5 * epoch + step))
                seen.append(Dropout(0.5)(torch.ones(64)))
            assert torch.equal(seen[0], seen[1])


@pytest.mark.report("NVIDIA/Megatron-LM#6858")
def test_a_mask_is_a_function_of_its_key_so_nothing_needs_to_be_saved() -> None:
    kept = [masks(cut=True, step=step) for step in range(6)]
    torch.rand(7)
    for step in (3, 4, 5):  # resumed
        resumed = masks(cut=True, step=step)
        assert all(torch.equal(resumed[at], kept[step][at]) for at in resumed)


@pytest.mark.report("allenai/OLMo-core#828")
@pytest.mark.report("openai/guided-diffusion#167")
@pytest.mark.parametrize("axis", [None, axis_of(1)])
def test_a_recomputed_forward_has_the_mask_of_the_first(axis: Axis | None) -> None:
    x = torch.ones(64, requires_grad=True)
    y = checkpoint(Dropout(0.5, axis=axis), x, use_reentrant=False)
    torch.rand(5)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_elements_are_dropped_with_probability_p_and_the_others_scaled(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y = Dropout(0.25)(torch.full((100, 100), 3.0, dtype=dtype))
    assert y.dtype == dtype and set(y.unique().tolist()) == {0.0, 4.0}
    assert abs(float((y == 0).double().mean()) - 0.25) < 0.02


def test_it_is_the_identity_in_evaluation_and_for_p_zero_as_nn_dropout() -> None:
    x = torch.ones(4)
    assert Dropout(0.5).eval()(x) is x and Dropout(0.0)(x) is x
    assert repr(Dropout(0.1)) == "Dropout(p=0.1)"
    assert list(Dropout().state_dict()) == list(nn.Dropout().state_dict()) == []


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_a_probability_is_at_least_zero_and_below_one(p: float) -> None:
    with pytest.raises(ValueError, match=f"dropout = {p} must be at least 0 and below 1"):
        Dropout(p)
