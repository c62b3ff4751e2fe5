from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.comm.collectives import all_gather
from parallel3d.comm.ledger import Ledger
from parallel3d.placement import Replicate, Shard, cut
from parallel3d.tensor import ColumnParallelLinear, RowParallelLinear
from parallel3d.topology import Axis, Grid, Topology
from tests.tensor.whole import TOLERANCE, Cut, compare, drawn
from tests.world import run_on

BLOCKS: list[int | tuple[int, ...]] = [1, 3, (24, 12, 12), (12, 24, 48, 12)]
ROWS = 12


def inputs(features: int) -> list[Tensor]:
    """Vectors of two dims, of three, of none, not contiguous, and no vector at all."""
    return [
        drawn(5, features),
        drawn(2, 3, features),
        drawn(features),
        drawn(features, 4, 2).permute(2, 1, 0),
        drawn(0, features),
    ]


def every_column(axis: Axis) -> dict[str, dict[str, float]]:
    errors = {}
    for blocks, bias, gather in product(BLOCKS, (True, False), (False, True)):
        size = 24 if isinstance(blocks, int) else sum(blocks)
        size = 36 if blocks == 3 else size
        whole = nn.Linear(ROWS, size, bias, dtype=torch.float64)
        layer = ColumnParallelLinear.from_linear(
            whole, axis=axis, gather_output=gather, blocks=blocks
        )
        y_cut = Cut() if gather else Cut(layer.blocks)
        for x in inputs(ROWS):
            whole.zero_grad()
            layer.zero_grad()
            case = f"column {blocks=} {bias=} {gather=} {tuple(x.shape)}"
            errors[case] = compare(layer, whole, x, axis, Cut(), y_cut)
    return errors


def every_row(axis: Axis) -> dict[str, dict[str, float]]:
    errors = {}
    for bias, parallel in product((True, False), (True, False)):
        whole = nn.Linear(24, 5, bias, dtype=torch.float64)
        layer = RowParallelLinear.from_linear(whole, axis=axis, input_is_parallel=parallel)
        for x in inputs(24):
            whole.zero_grad()
            layer.zero_grad()
            case = f"row {bias=} {parallel=} {tuple(x.shape)}"
            errors[case] = compare(layer, whole, x, axis, Cut((24,) if parallel else ()), Cut())
    return errors


def every_linear(topology: Topology) -> dict[str, dict[str, float]]:
    torch.manual_seed(2)
    return {**every_column(topology.tp), **every_row(topology.tp)}


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_linear_layers_equal_nn_linear_in_output_and_every_gradient(tp: int) -> None:
    for rank in run_on(Grid(tp=tp), every_linear):
        wrong = {case: found for case, found in rank.items() if max(found.values()) > TOLERANCE}
        assert not wrong and len(rank) == 100


def test_over_one_rank_linear_layers_are_exactly_nn_linear() -> None:
    torch.manual_seed(2)
    for errors in (every_column(Axis.single()), every_row(Axis.single())):
        assert {error for found in errors.values() for error in found.values()} == {0.0}


# Biases


def biases(topology: Topology) -> list[Tensor]:
    layer = RowParallelLinear(8, 3, axis=topology.tp)
    value = torch.tensor([7.0, -3.0, 11.0])
    assert layer.bias is not None
    with torch.no_grad():
        layer.bias.copy_(value)
    assert torch.equal(layer(torch.zeros(2, 8 // topology.tp.size)), value.expand(2, 3))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(10):
        x = cut(drawn(4, 8, seed=step, dtype=torch.float32), Shard(1, (8,)), topology.tp)
        layer(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [layer.bias.detach()]


@pytest.mark.report("Wenyueh/MinivLLM#80")
@pytest.mark.report("huggingface/text-generation-inference#1036")
def test_a_row_layer_adds_its_bias_once_and_it_stays_equal_on_all_ranks() -> None:
    for tp in (1, 2, 4):
        every = run_on(Grid(tp=tp), biases)
        assert all(torch.equal(every[0][0], other[0]) for other in every)


def step_by_step(axis: Axis, dtype: torch.dtype) -> dict[str, Tensor]:
    """Norms and row biases after 20 Adam steps of two blocks, norms around the cut layers."""
    torch.manual_seed(4)

    def block() -> nn.Sequential:
        return nn.Sequential(
            nn.LayerNorm(8),
            ColumnParallelLinear(8, 16, axis=axis),
            nn.GELU(),
            RowParallelLinear(16, 8, axis=axis),
        )

    model = nn.Sequential(block(), block(), nn.LayerNorm(8)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(20):
        x, target = (drawn(6, 8, seed=2 * step + i, dtype=torch.float32).to(dtype) for i in (0, 1))
        (model(x) - target).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [f"{n}.{kind}" for n in ("0.0", "1.0", "2") for kind in ("weight", "bias")]
    parameters = dict(model.named_parameters())
    return {name: parameters[name].detach() for name in (*names, "0.3.bias", "1.3.bias")}


def both_precisions(topology: Topology) -> list[dict[str, Tensor]]:
    return [step_by_step(topology.tp, dtype) for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.report("EleutherAI/gpt-neox#1259")
@pytest.mark.report("NVIDIA/TransformerEngine#441")
@pytest.mark.report("NVIDIA/Megatron-LM#1446")
def test_replicated_norms_and_biases_stay_bit_equal_over_tp_and_follow_one_process() -> None:
    one = step_by_step(Axis.single(), torch.float32)
    first, second = run_on(Grid(tp=2), both_precisions)
    for mine, other in zip(first, second, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in one)
    for name, value in one.items():
        torch.testing.assert_close(first[0][name], value, rtol=1e-5, atol=1e-5)


# Initial values, state dicts, conversion


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


# The order of a backward pass


class Matmuls(TorchDispatchMode):
    """Writes each matrix product into the trace of the ledger, by the shape of its result."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default:
            self.ledger.trace.append(("matmul", tuple(result.shape)))  # type: ignore[arg-type]
        return result


def backward_trace(topology: Topology) -> list[tuple[Any, ...]]:
    layer = ColumnParallelLinear(6, 8, axis=topology.tp)
    ledger = Ledger()
    ledger.tracing = True
    y = layer(torch.ones(5, 6, requires_grad=True))
    ledger.attach(topology.tp)
    with Matmuls(ledger):
        y.sum().backward()
    return [(e[0], e[1]) if e[0] == "matmul" else (e[1], e[3]) for e in ledger.trace]


def test_the_input_gradient_s_all_reduce_runs_behind_the_weight_gradient_s_matmul() -> None:
    for trace in run_on(Grid(tp=2), backward_trace):
        assert trace == [
            ("matmul", (5, 6)),
            ("all_reduce", "issue"),
            ("matmul", (4, 6)),
            ("all_reduce", "wait"),
        ]


def sent(topology: Topology) -> list[tuple[str, int, int]]:
    """Bytes forward and backward of each layer, for an input of 5 rows of 8 or a slice of it."""
    axis, ledger = topology.tp, Ledger()
    ledger.attach(axis)
    layers = {
        "column": ColumnParallelLinear(8, 12, axis=axis),
        "column, fused": ColumnParallelLinear(8, 12, axis=axis, blocks=3),
        "column, gathered": ColumnParallelLinear(8, 12, axis=axis, gather_output=True),
        "row": RowParallelLinear(8, 12, axis=axis),
        "row, whole input": RowParallelLinear(8, 12, axis=axis, input_is_parallel=False),
    }
    found = []
    for name, layer in layers.items():
        x = torch.ones(5, 4 if name == "row" else 8, requires_grad=True)
        ledger.reset()
        y = layer(x)
        forward = sum(ledger.bytes().values())
        y.sum().backward()
        found.append((name, forward, sum(ledger.bytes().values()) - forward))
    x = torch.ones(5, 8)
    ledger.reset()
    layers["column"](x).sum().backward()
    found.append(("column, input without gradient", *(2 * [sum(ledger.bytes().values())])))
    return found


def test_layers_send_what_their_docstrings_say() -> None:
    x, y, fp32, half = 5 * 8, 5 * 12, 4, 2
    for found in run_on(Grid(tp=2), sent):
        assert found == [
            ("column", 0, fp32 * x),
            ("column, fused", 0, fp32 * x),
            ("column, gathered", fp32 * y // half, fp32 * x),
            ("row", fp32 * y, 0),
            ("row, whole input", fp32 * y, fp32 * x // half),
            ("column, input without gradient", 0, 0),
        ]


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
