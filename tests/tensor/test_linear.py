from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.comm.ledger import Ledger
from parallel3d.placement import Shard, cut
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
