"""The models cut over tp against their whole references."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import models.gpt
import models.llama
import models.mlp
from parallel3d.placement import cut, placements
from parallel3d.tensor import vocab_parallel_cross_entropy
from parallel3d.topology import Axis, Grid, Topology
from tests.world import run_on

# A vocabulary of 23 leaves one padded row at tp = 2.
LANGUAGE = {
    "vocab_size": 23,
    "width": 16,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_width": 12,
    "max_seq_len": 7,
}
GROUPED = {**LANGUAGE, "num_kv_heads": 2, "rope_theta": 100.0}
REGRESSION = {"in_features": 3, "out_features": 2, "width": 8, "num_layers": 2, "ffn_width": 12}
CASES: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "gpt": (models.gpt, LANGUAGE),
    "gpt tied": (models.gpt, {**LANGUAGE, "tied": True}),
    "llama": (models.llama, GROUPED),
    "llama tied, biases": (models.llama, {**GROUPED, "tied": True, "qkv_bias": True}),
    "llama, one head per group": (models.llama, {**GROUPED, "num_kv_heads": 4}),
    "mlp": (models.mlp, REGRESSION),
}
ONE = SimpleNamespace(tp=Axis.single())


def randomised(model: nn.Sequential) -> nn.Sequential:
    torch.manual_seed(3)
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def batch(case: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if case == "mlp":
        x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        return x, torch.randn(5, 2, generator=generator, dtype=torch.float64)
    x = torch.randint(23, (2, 8), generator=generator)
    return x[:, :-1], x[:, 1:]


def whole_loss(output: Tensor, target: Tensor) -> Tensor:
    if output.is_floating_point() and target.is_floating_point():
        return mse_loss(output, target, reduction="sum")
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def cut_loss(output: Tensor, target: Tensor, axis: Axis) -> Tensor:
    if target.is_floating_point():
        return mse_loss(output, target, reduction="sum")
    return vocab_parallel_cross_entropy(output, target, axis=axis)


def error(ours: Tensor, whole: Tensor) -> float:
    return ((ours - whole).abs().max() / whole.abs().max().clamp_min(1e-300)).item()


@pytest.mark.parametrize("case", CASES)
def test_at_tp_1_the_model_is_its_reference_bit_for_bit(case: str) -> None:
    package, sizes = CASES[case]
    whole = randomised(package.reference(**sizes))
    ours = package.build(ONE, **sizes).double()
    ours.load_state_dict(whole.state_dict())
    x, target = batch(case)
    expected, output = whole(x), ours(x)
    assert torch.equal(output, expected)
    whole_loss(expected, target).backward()
    cut_loss(output, target, ONE.tp).backward()
    named = dict(whole.named_parameters())
    assert list(named) == [name for name, _ in ours.named_parameters()]
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, named[name].grad), name


def compare_with_reference(topology: Topology) -> dict[str, float]:
    """The largest error of loss, logits and gradients, by case."""
    return {case: compare_case(topology.tp, case) for case in CASES}


def compare_case(axis: Axis, case: str) -> float:
    package, sizes = CASES[case]
    whole = randomised(package.reference(**sizes))
    ours = package.build(SimpleNamespace(tp=axis), **sizes).double()
    placed = placements(ours)
    for name, value in whole.state_dict().items():
        ours.get_parameter(name).data.copy_(cut(value, placed[name], axis))
    x, target = batch(case)
    whole_loss(whole(x), target).backward()
    output = ours(x)
    loss = cut_loss(output, target, axis)
    loss.backward()
    errors = [error(loss, whole_loss(whole(x), target))]
    named = dict(whole.named_parameters())
    # A key's bias has no true gradient: softmax does not see it, only rounding does.
    scale = max(p.grad.abs().max().item() for p in named.values())
    for name, parameter in ours.named_parameters():
        expected = cut(named[name].grad, placed[name], axis)
        errors.append(((parameter.grad - expected).abs().max() / scale).item())
        if not name.endswith("qkv.bias"):
            errors.append(error(parameter.grad, expected))
    return max(errors)


@pytest.mark.report("sgl-project/sglang#31799")
def test_at_tp_2_loss_and_every_gradient_equal_the_reference() -> None:
    for errors in run_on(Grid(tp=2), compare_with_reference):
        assert max(errors.values()) < 1e-12, errors


def start_values(topology: Topology) -> dict[str, dict[str, Tensor]]:
    """Every case's first parameters under one seed, as this rank holds them."""
    values = {}
    for case, (package, sizes) in CASES.items():
        torch.manual_seed(5)
        values[case] = dict(package.build(topology, **sizes).state_dict())
    return values


def test_ranks_under_one_seed_start_as_cuts_of_one_whole_model() -> None:
    whole = start_values(ONE)
    for rank, values in enumerate(run_on(Grid(tp=2), start_values)):
        axis = Axis("tp", 2, rank, (0, 1))
        for case, (package, sizes) in CASES.items():
            with torch.device("meta"):
                placed = placements(package.build(SimpleNamespace(tp=axis), **sizes))
            for name, value in values[case].items():
                assert torch.equal(value, cut(whole[case][name], placed[name], axis)), (case, name)


def residual_stream(topology: Topology) -> list[list[Tensor]]:
    """Under dropout: what leaves the embedding and each block, and each attention's local mask."""
    streams = []
    for package, sizes in (CASES["gpt"], CASES["llama"]):
        torch.manual_seed(5)
        model = package.build(topology, **sizes, dropout=0.5)
        x, _ = batch("gpt")
        stream = []
        for unit in model[:-1]:
            x = unit(x)
            stream.append(x.detach())
        torch.manual_seed(6)
        streams.append([*stream, model[1].attention.dropout(torch.ones(64))])
    return streams


@pytest.mark.report("tenstorrent/tt-metal#55947")
def test_dropout_is_the_same_over_tp_on_whole_activations_and_differs_on_heads() -> None:
    first, second = run_on(Grid(tp=2), residual_stream)
    for ours, theirs in zip(first, second, strict=True):
        *stream, mask = ours
        *other_stream, other_mask = theirs
        for a, b in zip(stream, other_stream, strict=True):
            assert torch.equal(a, b)
            assert a.isfinite().all()
        assert not torch.equal(mask, other_mask)
