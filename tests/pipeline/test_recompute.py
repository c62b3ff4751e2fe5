from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel3d.rng import seed_of
from tests.pipeline.unit_cases import CASES, REPEATABLE, in_place_through_a_view
from tests.pipeline.units import (
    WIDTH,
    Apply,
    Told,
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

MODES = ["full", "selective"]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """A way to recompute."""
    return str(request.param)


@pytest.mark.parametrize("needs_grad", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize("case", REPEATABLE)
def test_recompute_changes_no_bit(mode: str, case: str, needs_grad: bool) -> None:
    x = hidden(needs_grad)
    again = by_stage(made(CASES[case]), x, recompute=mode)
    assert agree(again, by_stage(made(CASES[case]), x))


def test_a_unit_is_announced_once_for_its_repeated_forward_and_its_backward(mode: str) -> None:
    told = Told()
    stage = stage_of([linear(), linear()], recompute=mode, weights=told)
    output = stage.forward(0, hidden(), seed=0)
    stage.backward(0, gradients_for(output))
    before = [event for event in told.events if event.startswith("before")]
    units = [("forward", "0"), ("forward", "1"), ("backward", "1 of 0"), ("backward", "0 of 0")]
    assert before == [f"before {what} {unit}" for what, unit in units]


@pytest.mark.report("openai/guided-diffusion#167")
def test_dropout_draws_the_same_mask_when_it_is_repeated(mode: str) -> None:
    stage = stage_of([nn.Dropout(0.5)], recompute=mode)
    x = torch.ones(64, requires_grad=True)
    output = stage.forward(0, x, seed=3)
    torch.rand(17)
    (gradient,) = stage.backward(0, [torch.ones(64)])
    assert torch.equal(gradient, output) and 0 < int((output == 0).sum()) < 64


@pytest.mark.report("allenai/OLMo-core#828")
def test_recompute_changes_no_bit_under_dropout_with_microbatches_in_flight(mode: str) -> None:
    results = []
    for recompute in ("none", mode):
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
def test_a_repeated_unit_is_trained_though_its_input_needs_no_gradient(
    mode: str, start: str
) -> None:
    def units() -> list[nn.Module]:
        head = [] if "without" in start else [nn.Embedding(5, WIDTH)]
        if start == "frozen embedding":
            frozen(head[0])
        return [*head, linear(), nn.ReLU(), linear()]

    x = hidden(needs_grad=False) if "without" in start else torch.tensor([0, 4, 4])
    again = by_stage(made(units), x, recompute=mode)
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
def test_a_unit_whose_forward_cannot_be_repeated_is_refused_by_name(
    mode: str, unit: nn.Module
) -> None:
    stage = stage_of([linear(), unit], recompute=mode)
    with pytest.raises(RuntimeError, match="unit 1 changes its input or a buffer in place"):
        stage.forward(0, hidden(), seed=0)


def test_an_input_overwritten_after_the_forward_is_found_when_it_is_repeated(mode: str) -> None:
    stage = stage_of([linear(), nn.Identity()], recompute=mode)
    output = stage.forward(0, hidden(), seed=0)
    with torch.no_grad():
        output.zero_()
    with pytest.raises(RuntimeError, match="unit 1 changes its input"):
        stage.backward(0, gradients_for(output))


@pytest.mark.parametrize("needs_grad", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize("case", REPEATABLE)
def test_the_same_outputs_need_a_gradient_with_recompute_as_without(
    mode: str, case: str, needs_grad: bool
) -> None:
    found = []
    for recompute in ("none", mode):
        seen: list[list[bool]] = []
        modules = made(CASES[case])
        for module in modules:
            module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(needs(args)))
        output = stage_of(modules, recompute=recompute).forward(0, hidden(needs_grad), seed=0)
        found.append([*seen, needs(output)])
    assert found[0] == found[1]


def needs(tree: Any) -> list[bool]:
    return [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(tree)]


def force(x: Tensor) -> Tensor:
    """The derivative of an energy, as models of molecules compute it."""
    return torch.autograd.grad(x.sin().square().sum(), x, create_graph=True)[0]


def test_a_unit_may_differentiate_in_its_forward(mode: str) -> None:
    units = lambda: [linear(), Apply(force), linear()]  # noqa: E731
    again = by_stage(made(units), hidden(), recompute=mode)
    assert agree(again, as_one_graph(made(units), hidden()))


class Moody(nn.Module):
    """Cuts its output off from its input every second time."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x * 2 if self.runs % 2 else (x * 2).detach()


def test_other_outputs_that_need_a_gradient_in_the_repeat_are_an_error_with_the_unit(
    mode: str,
) -> None:
    stage = stage_of([linear(), Moody()], recompute=mode)
    output = stage.forward(0, hidden(), seed=0)
    with pytest.raises(RuntimeError, match=r"unit 1 gives outputs .* recompute.mode=none") as error:
        stage.backward(0, gradients_for(output))
    assert error.value.__notes__ == ["in unit 1 (Moody), stage 0"]
