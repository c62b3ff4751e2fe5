from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel3d.rng import seed_of
from tests.pipeline.unit_cases import CASES, REPEATABLE, in_place_through_a_view
from tests.pipeline.units import (
    WIDTH,
    Apply,
    agree,
    as_one_graph,
    by_stage,
    frozen,
    gradients_for,
    hidden,
    linear,
    made,
    same,
    stage_of,
)


@pytest.mark.parametrize("needs_grad", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize("case", REPEATABLE)
def test_recompute_changes_no_bit(case: str, needs_grad: bool) -> None:
    x = hidden(needs_grad)
    again = by_stage(made(CASES[case]), x, recompute=True)
    assert agree(again, by_stage(made(CASES[case]), x))


def test_a_unit_is_announced_again_before_its_forward_is_repeated() -> None:
    told: list[int] = []
    stage = stage_of([linear(), linear()], recompute=True, before=told.append)
    output = stage.forward(0, hidden(), seed=0)
    stage.backward(0, gradients_for(output))
    assert told == [0, 1, 1, 0]


@pytest.mark.report("openai/guided-diffusion#167")
def test_dropout_draws_the_same_mask_when_it_is_repeated() -> None:
    stage = stage_of([nn.Dropout(0.5)], recompute=True)
    x = torch.ones(64, requires_grad=True)
    output = stage.forward(0, x, seed=3)
    torch.rand(17)
    (gradient,) = stage.backward(0, [torch.ones(64)])
    assert torch.equal(gradient, output) and 0 < int((output == 0).sum()) < 64


@pytest.mark.report("allenai/OLMo-core#828")
def test_recompute_changes_no_bit_under_dropout_with_microbatches_in_flight() -> None:
    results = []
    for recompute in (False, True):
        modules = made(lambda: [linear(), nn.Dropout(0.5), linear(), nn.Dropout(0.2), linear()])
        stage = stage_of(modules, recompute=recompute)
        generator = torch.Generator().manual_seed(7)
        xs = [torch.randn(3, WIDTH, generator=generator) for _ in range(4)]
        outputs = [stage.forward(k, x, seed=seed_of(k)) for k, x in enumerate(xs)]
        for k, output in enumerate(outputs):
            torch.rand(k)
            stage.backward(k, gradients_for(output))
        results.append([*outputs, *(p.grad for m in modules for p in m.parameters())])
    assert all(map(same, *results))


def test_every_microbatch_and_every_unit_has_a_dropout_mask_of_its_own() -> None:
    stage = stage_of([nn.Dropout(0.5), nn.Dropout(0.5)])
    ones = torch.ones(64)
    first, again, other = (stage.forward(k, ones, seed=seed) for k, seed in enumerate((1, 1, 2)))
    assert torch.equal(first, again) and not torch.equal(first, other)
    alone = stage_of([nn.Dropout(0.5)]).forward(0, ones, seed=1)
    assert not torch.equal((alone != 0) & (first != 0), alone != 0), "both units drew one mask"


@pytest.mark.report("huggingface/transformers#21381")
@pytest.mark.report("deepspeedai/DeepSpeed#4118")
@pytest.mark.parametrize("start", ["an input without gradient", "integer ids", "frozen embedding"])
def test_a_repeated_unit_is_trained_though_its_input_needs_no_gradient(start: str) -> None:
    def units() -> list[nn.Module]:
        head = [] if "without" in start else [nn.Embedding(5, WIDTH)]
        if start == "frozen embedding":
            frozen(head[0])
        return [*head, linear(), nn.ReLU(), linear()]

    x = hidden(needs_grad=False) if "without" in start else torch.tensor([0, 4, 4])
    again = by_stage(made(units), x, recompute=True)
    assert agree(again, as_one_graph(made(units), x))
    trained = [grad for grad in again[2] if grad is not None]
    assert len(trained) == (5 if start == "integer ids" else 4)
    assert all(bool(grad.any()) for grad in trained)


@pytest.mark.parametrize(
    "unit",
    [
        nn.ReLU(inplace=True),
        Apply(in_place_through_a_view),
        Apply(lambda x: x * x.view(-1).zero_().sum()),
        nn.BatchNorm1d(WIDTH),
    ],
    ids=["inplace", "through a view", "hidden", "running statistics"],
)
def test_a_unit_whose_forward_cannot_be_repeated_is_refused_by_name(unit: nn.Module) -> None:
    stage = stage_of([linear(), unit], recompute=True)
    with pytest.raises(RuntimeError, match="unit 1 changes its input or a buffer in place"):
        stage.forward(0, hidden(), seed=0)


def test_an_input_overwritten_after_the_forward_is_found_when_it_is_repeated() -> None:
    stage = stage_of([linear(), nn.Identity()], recompute=True)
    output = stage.forward(0, hidden(), seed=0)
    with torch.no_grad():
        output.zero_()
    with pytest.raises(RuntimeError, match="unit 1 changes its input"):
        stage.backward(0, gradients_for(output))
