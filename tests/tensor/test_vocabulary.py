from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import all_gather
from parallel3d.comm.ledger import Ledger
from parallel3d.placement import Shard
from parallel3d.tensor import VocabParallelEmbedding, VocabParallelLinear
from parallel3d.topology import Axis, Grid, Topology
from tests.tensor.whole import TOLERANCE, Cut, compare, drawn, error
from tests.world import run_on

# 3 over 4 ranks leaves the last rank nothing but padding; 8 and 12 divide.
SIZES = (3, 7, 8, 10, 11, 12, 50257)


def ids(size: int) -> Tensor:
    """Every border of every cut, some ids twice."""
    generator = torch.Generator().manual_seed(size)
    some = torch.randint(size, (2, 9), generator=generator)
    return torch.cat([some, torch.arange(18).view(2, 9) % size, torch.full((1, 9), size - 1)])


def embeddings(axis: Axis) -> dict[str, dict[str, float]]:
    errors = {}
    for size in SIZES:
        whole = nn.Embedding(size, 2, dtype=torch.float64)
        layer = VocabParallelEmbedding.from_embedding(whole, axis=axis)
        rows = -(-size // axis.size)
        assert layer.weight.shape == (rows, 2)
        errors[f"{size}"] = compare(layer, whole, ids(size), axis, Cut(), Cut())
        padding = layer.weight[max(0, min(rows, size - axis.rank * rows)) :]
        assert not padding.any(), "padding is zero"
        assert layer.weight.grad is not None
        assert not layer.weight.grad[rows - len(padding) :].any(), "and gets no gradient"
        assert layer(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 2)
    return errors


def padded_logits(whole: nn.Linear, x: Tensor, columns: int) -> Tensor:
    y = whole(x)
    return torch.cat([y, y.new_full((*y.shape[:-1], columns - y.shape[-1]), -torch.inf)], -1)


def heads(axis: Axis) -> dict[str, dict[str, float]]:
    """By a softmax over the joined logits: padding has no probability and gets no gradient."""
    errors = {}
    for size, bias in product(SIZES, (False, True)):
        whole = nn.Linear(2, size, bias, dtype=torch.float64)
        layer = VocabParallelLinear.from_linear(whole, axis=axis)
        x = drawn(4, 2).requires_grad_()
        x_whole = x.detach().clone().requires_grad_()
        rows = -(-size // axis.size)
        logits = layer(x)
        expected = padded_logits(whole, x_whole, rows * axis.size)
        own = slice(axis.rank * rows, (axis.rank + 1) * rows)
        assert torch.equal(torch.isinf(logits), torch.isinf(expected[:, own]))
        weights = drawn(4, size, seed=1)
        weights = torch.cat([weights, torch.full((4, rows * axis.size - size), 9.0)], -1)
        (torch.softmax(expected, -1) * weights).sum().backward()
        # The same gradient of the logits, this rank's columns of it.
        whole_logits = expected.detach().requires_grad_()
        (torch.softmax(whole_logits, -1) * weights).sum().backward()
        assert whole_logits.grad is not None
        logits.backward(whole_logits.grad[:, own])
        used = max(0, min(rows, size - axis.rank * rows))
        assert x.grad is not None and x_whole.grad is not None
        found = {
            "output": error(logits.detach()[:, :used], expected.detach()[:, own][:, :used]),
            "input's gradient": error(x.grad, x_whole.grad),
        }
        for name, parameter in layer.named_parameters():
            grad, expected_grad = parameter.grad, whole.get_parameter(name).grad
            assert grad is not None and expected_grad is not None
            found[name] = error(grad[:used], expected_grad[own])
            assert not grad[used:].any() and not parameter[used:].any()
        errors[f"{size}, {bias=}"] = found
    return errors


def every_layer(topology: Topology) -> dict[str, dict[str, float]]:
    torch.manual_seed(3)
    return {**embeddings(topology.tp), **heads(topology.tp)}


@pytest.mark.report("sgl-project/sglang#31799")
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_any_vocabulary_is_cut_and_equals_the_whole_in_output_and_gradients(tp: int) -> None:
    for errors in run_on(Grid(tp=tp), every_layer):
        wrong = {case: found for case, found in errors.items() if max(found.values()) > TOLERANCE}
        assert not wrong and len(errors) == 3 * len(SIZES)


def test_over_one_rank_both_layers_are_exactly_their_counterparts() -> None:
    torch.manual_seed(3)
    for errors in (embeddings(Axis.single()), heads(Axis.single())):
        assert {e for found in errors.values() for e in found.values()} == {0.0}


def initial(topology: Topology) -> list[Tensor]:
    axis = topology.tp
    torch.manual_seed(5)
    layers = [VocabParallelEmbedding(199, 3, axis=axis), VocabParallelLinear(3, 199, axis=axis)]
    return [all_gather(layer.weight.detach(), axis, 0)[:199] for layer in layers]


def test_ranks_under_one_seed_start_as_cuts_of_one_whole_table() -> None:
    (one,) = run_on(Grid(), initial)
    for tp in (2, 4):
        for every in run_on(Grid(tp=tp), initial):
            assert all(torch.equal(a, b) for a, b in zip(one, every, strict=True))
    table = one[0]
    assert len(table.unique()) == table.numel()
    assert abs(float(table.mean())) < 0.15 and abs(float(table.std()) - 1) < 0.1


def wrong_ids(topology: Topology) -> list[str]:
    axis, ledger = topology.tp, Ledger()
    layer = VocabParallelEmbedding(10, 2, axis=axis)
    ledger.attach(axis)
    messages = []
    for wrong in (10, 11, -1):
        with pytest.raises(IndexError) as raised:
            layer(torch.tensor([[0, wrong], [5, 0]]))
        messages.append(str(raised.value))
    assert not ledger.bytes(), "before anything is sent"
    return messages


@pytest.mark.report("pytorch/torchtitan#4297")
def test_an_id_outside_the_vocabulary_raises_index_error_on_all_ranks() -> None:
    expected = [f"index out of range in self: id {wrong} is not in 0..9" for wrong in (10, 11, -1)]
    assert run_on(Grid(tp=3), wrong_ids) == [expected] * 3
    (one,) = run_on(Grid(), one_process_ids)
    assert all(text.startswith(one) for text in expected), "as nn.Embedding says it"


def one_process_ids(topology: Topology) -> str:
    with pytest.raises(IndexError) as raised:
        VocabParallelEmbedding(10, 2, axis=topology.tp)(torch.tensor([10]))
    return str(raised.value)


def sent(topology: Topology) -> tuple[int, int, int, int]:
    axis, ledger = topology.tp, Ledger()
    embedding = VocabParallelEmbedding(10, 3, axis=axis)
    head = VocabParallelLinear(3, 10, axis=axis)
    ledger.attach(axis)
    counts = []
    x = embedding(torch.zeros(2, 5, dtype=torch.int64))
    counts.append(sum(ledger.bytes().values()))
    x.sum().backward()
    counts.append(sum(ledger.bytes().values()))
    ledger.reset()
    y = head(torch.ones(2, 5, 3, requires_grad=True))
    counts.append(sum(ledger.bytes().values()))
    y.sum().backward()
    counts.append(sum(ledger.bytes().values()))
    return tuple(counts)  # type: ignore[return-value]


def test_both_layers_send_what_their_docstrings_say() -> None:
    elements = 2 * 5 * 3 * 4
    assert run_on(Grid(tp=2), sent) == [(elements, elements, 0, elements)] * 2


def test_state_dicts_have_the_keys_of_their_counterparts_and_padded_local_shapes() -> None:
    axis = Axis("tp", 4, 3, (0, 1, 2, 3))
    table = VocabParallelEmbedding.from_embedding(nn.Embedding(10, 4), axis=axis)
    assert {n: tuple(v.shape) for n, v in table.state_dict().items()} == {"weight": (3, 4)}
    assert table.placements() == {"weight": Shard(0, (10,))}
    assert repr(table) == "VocabParallelEmbedding(10, 4, axis=tp/4)"
    for bias in (False, True):
        whole = nn.Linear(4, 10, bias)
        head = VocabParallelLinear.from_linear(whole, axis=axis)
        assert list(head.state_dict()) == list(whole.state_dict())
        assert head.weight.shape == (3, 4) and torch.equal(head.weight[0], whole.weight[9])
        assert not head.weight[1:].any()


@pytest.mark.parametrize(
    ("option", "value", "use"),
    [
        ("padding_idx", 0, "None"),
        ("max_norm", 1.0, "None"),
        ("scale_grad_by_freq", True, "False"),
        ("sparse", True, "False"),
    ],
)
def test_an_option_of_nn_embedding_that_would_be_lost_is_refused(
    option: str, value: float, use: str
) -> None:
    whole = nn.Embedding(4, 2, **{option: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{option} = {value} is not offered: use {use}"):
        VocabParallelEmbedding.from_embedding(whole, axis=Axis.single())
