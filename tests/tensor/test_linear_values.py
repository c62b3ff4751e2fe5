from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import all_gather
from parallel3d.placement import Replicate, Shard, cut
from parallel3d.tensor import ColumnParallelLinear, RowParallelLinear
from parallel3d.topology import Axis, Grid, Topology
from tests.world import run_on


def gathered(layer: ColumnParallelLinear | RowParallelLinear) -> dict[str, Tensor]:
    found = {}
    for name, parameter in layer.named_parameters():
        placement = layer.placements()[name]
        whole = parameter.detach()
        if isinstance(placement, Shard):
            whole = all_gather(whole, layer.axis, placement.dim)
        found[name] = whole
    return found


def initial(topology: Topology) -> list[dict[str, Tensor]]:
    axis = topology.tp
    torch.manual_seed(11)
    layers = [
        ColumnParallelLinear(8, 16, axis=axis),
        RowParallelLinear(16, 200, axis=axis),
        ColumnParallelLinear(3, 400, axis=axis),
    ]
    return [gathered(layer) for layer in layers]


@pytest.mark.report("modelscope/ms-swift#7944")
def test_ranks_under_one_seed_start_as_cuts_of_one_whole_layer() -> None:
    (one,) = run_on(Grid(), initial)
    for tp in (2, 4):
        for every in run_on(Grid(tp=tp), initial):
            for whole, layer in zip(one, every, strict=True):
                assert all(torch.equal(whole[name], layer[name]) for name in whole)
    weight = one[0]["weight"]
    assert int(torch.linalg.matrix_rank(weight)) == 8
    assert len(weight.unique()) == weight.numel(), "no rows repeat"
    bound = 8**-0.5
    assert -bound <= float(weight.min()) < -bound / 2 < bound / 2 < float(weight.max()) <= bound


def test_initial_values_depend_on_no_default_dtype_or_device() -> None:
    def layer() -> Tensor:
        torch.manual_seed(1)
        return ColumnParallelLinear(4, 6, axis=Axis.single()).weight.detach()

    single = layer()
    torch.set_default_dtype(torch.float64)
    try:
        double = layer()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(single.double(), double)
    with torch.device("meta"):
        state = torch.get_rng_state()
        assert ColumnParallelLinear(4, 6, axis=Axis.single()).weight.is_meta
        assert torch.equal(state, torch.get_rng_state())


def test_a_model_may_draw_its_weights_in_another_way_and_biases_are_then_zero() -> None:
    axis = Axis("tp", 2, 1, (0, 1))
    layer = RowParallelLinear(8, 70, axis=axis)
    seen: list[tuple[tuple[int, ...], int]] = []

    def count(rows: Tensor, fan_in: int) -> None:
        seen.append((tuple(rows.shape), fan_in))
        rows.copy_(torch.arange(8.0).expand(len(rows), 8))

    layer.init_weight = count
    layer.reset_parameters()
    assert seen == [((64, 8), 8), ((6, 8), 8)], "blocks of 64 rows of the whole weight"
    assert torch.equal(layer.weight, torch.arange(4.0, 8.0).expand(70, 4))
    assert layer.bias is not None and not layer.bias.any()


@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_have_the_keys_of_nn_linear_and_local_shapes(bias: bool) -> None:
    axis = Axis("tp", 4, 2, (0, 1, 2, 3))
    whole = nn.Linear(8, 12, bias)
    for kind, placements in (
        (ColumnParallelLinear, {"weight": Shard(0, (12,)), "bias": Shard(0, (12,))}),
        (RowParallelLinear, {"weight": Shard(1, (8,)), "bias": Replicate()}),
    ):
        layer = kind.from_linear(whole, axis=axis)
        assert list(layer.state_dict()) == list(whole.state_dict())
        assert layer.placements() == placements
        local = {n: cut(v, placements[n], axis) for n, v in whole.state_dict().items()}
        fresh = kind(8, 12, bias, axis=axis)
        fresh.load_state_dict(local)
        for name, value in layer.state_dict().items():
            assert torch.equal(value, local[name]) and torch.equal(fresh.state_dict()[name], value)


def test_from_linear_keeps_dtype_and_frozen_weights_and_shares_no_memory() -> None:
    whole = nn.Linear(4, 6, dtype=torch.bfloat16)
    whole.weight.requires_grad_(False)
    for axis in (Axis.single(), Axis("tp", 2, 0, (0, 1))):
        for kind in (ColumnParallelLinear, RowParallelLinear):
            layer = kind.from_linear(whole, axis=axis)
            assert layer.weight.dtype == torch.bfloat16 and layer.bias is not None
            assert not layer.weight.requires_grad and layer.bias.requires_grad
            assert layer.weight.data_ptr() != whole.weight.data_ptr()
            assert layer.bias.data_ptr() != whole.bias.data_ptr()


# What is refused


def refusals(axis: Axis) -> list[str]:
    """The message of each call that cannot be done, which names no rank."""
    layer = ColumnParallelLinear(4, 8, axis=axis)

    def under_autocast() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(torch.ones(1, 4))

    calls = [
        lambda: ColumnParallelLinear(8, 10, axis=axis),
        lambda: RowParallelLinear(10, 8, axis=axis),
        lambda: ColumnParallelLinear(6, 18, axis=axis, blocks=3),
        lambda: ColumnParallelLinear(8, 20, axis=axis, blocks=(8, 6, 6)),
        lambda: ColumnParallelLinear(8, 16, axis=axis, blocks=3),
        lambda: ColumnParallelLinear(8, 16, axis=axis, blocks=(8, 4)),
        lambda: ColumnParallelLinear.from_linear(nn.Linear(8, 10), axis=axis),
        lambda: RowParallelLinear.from_linear(nn.Linear(10, 8), axis=axis),
        lambda: ColumnParallelLinear(4, 8, axis=axis, sequence_parallel=True),
        lambda: RowParallelLinear(4, 8, axis=axis, sequence_parallel=True),
        under_autocast,
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
    return messages


@pytest.mark.report("pytorch/torchtitan#2577")
@pytest.mark.report("vllm-project/vllm#52535")
def test_what_cannot_be_cut_is_refused_at_build_naming_layer_size_tp_and_legal_values() -> None:
    messages = refusals(Axis("tp", 4, 1, (0, 1, 2, 3)))
    assert messages == refusals(Axis("tp", 4, 0, (0, 1, 2, 3))), "the same on every rank"
    column, row, fused, unequal, *others = messages
    assert column == (
        "ColumnParallelLinear(8, 10) cuts 10 output features over tp = 4, which does not divide "
        "them: use tp = 1, 2, 5"
    )
    assert row == (
        "RowParallelLinear(10, 8) cuts 10 input features over tp = 4, which does not divide "
        "them: use tp = 1, 2, 5"
    )
    assert "ColumnParallelLinear(6, 18) cuts 6 output features" in fused
    assert "use tp = 2, 3, 6" in fused
    assert "cuts 6 output features over tp = 4" in unequal
    assert "blocks = 3 does not divide out_features = 16: give a tuple of sizes" in others[0]
    assert "blocks = (8, 4) add up to 12, not out_features = 16" in others[1]
    assert others[2:4] == [column, row]
    assert (
        others[4]
        == others[5]
        == ("sequence_parallel=True is not built yet: use sequence_parallel=False")
    )
    assert "a parallel layer does not follow torch.autocast" in others[6]
