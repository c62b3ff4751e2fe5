from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parallel3d.pipeline.stage import Stage
from tests.pipeline.unit_cases import CASES, two_outputs
from tests.pipeline.units import (
    WIDTH,
    Apply,
    Told,
    agree,
    as_one_graph,
    by_stage,
    fresh,
    gradients_for,
    hidden,
    linear,
    made,
    same,
    stage_of,
)


@pytest.mark.parametrize("needs_grad", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize("case", CASES)
def test_units_as_segments_equal_one_graph_bit_for_bit(case: str, needs_grad: bool) -> None:
    x = hidden(needs_grad)
    assert agree(by_stage(made(CASES[case]), x), as_one_graph(made(CASES[case]), x))


def test_microbatches_add_up_as_backwards_one_after_another() -> None:
    xs = [hidden() for _ in range(3)]
    plain = made(CASES["layers"])
    for x in xs:
        *_, expected = as_one_graph(plain, x)
    modules = made(CASES["layers"])
    stage = stage_of(modules)
    outputs = [stage.forward(k, fresh(x), seed=k) for k, x in enumerate(xs)]
    assert stage.in_flight == 3
    for k, output in enumerate(outputs):
        stage.backward(k, gradients_for(output))
    assert all(map(same, [p.grad for m in modules for p in m.parameters()], expected))


def test_an_input_gives_its_gradient_and_keeps_none() -> None:
    stage, x = stage_of([linear()]), hidden()
    found = [stage.backward(0, gradients_for(stage.forward(0, x, seed=0))) for _ in range(2)]
    assert x.grad is None and torch.equal(found[0][0], found[1][0])


def test_outputs_in_one_memory_are_handed_on_as_copies() -> None:
    # So this stage computes what two ranks would, between which no memory is shared.
    x = torch.tensor([3.0], requires_grad=True)
    stage = stage_of([Apply(lambda x: (x * 1,) * 2), Apply(lambda x: x[0].mul_(2) * x[1])])
    assert stage.forward(0, x, seed=0).item() == 2 * 3 * 3
    assert stage.backward(0, [torch.ones(1)])[0].item() == 2 * 2 * 3
    first, second = stage_of([Apply(lambda x: (x, x))]).evaluate(x.detach(), seed=0)
    assert first.data_ptr() != second.data_ptr()


def test_a_stage_is_one_of_many() -> None:
    """Cut anywhere, the stages together equal one of all units."""
    x = hidden()
    whole = by_stage(made(CASES["layers"]), x)
    for cut in range(1, 5):
        modules = made(CASES["layers"])
        first, second = stage_of(modules[:cut]), Stage(1, stage_of(modules).units[cut:])
        y = first.forward(0, fresh(x), seed=0)
        output = second.forward(0, y, seed=0)
        gradients = second.backward(0, gradients_for(output))
        inputs = first.backward(0, gradients)
        parameters = [p.grad for m in modules for p in m.parameters()]
        assert agree(([output], inputs, parameters), whole)


def test_what_a_unit_before_has_saved_may_not_be_overwritten_just_as_in_one_graph() -> None:
    modules = [nn.Tanh(), nn.ReLU(inplace=True)]
    for way in (as_one_graph, by_stage):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            way(modules, hidden())


@pytest.mark.parametrize("function", [torch.t, torch.conj, lambda x: x[:, :1].expand(WIDTH, 3)])
def test_tensors_at_a_border_are_contiguous(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(WIDTH, 3, dtype=torch.complex64, requires_grad=True)
    stage = stage_of([Apply(function)])
    output = stage.forward(0, x, seed=0)
    (gradient,) = stage.backward(0, gradients_for(output))
    for tensor in (output, gradient):
        assert tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def test_a_unit_is_announced_before_its_forward_and_around_its_backward() -> None:
    told: list[str] = []
    modules = [Apply(lambda x, k=k: told.append(f"forward {k}") or x * 2) for k in range(2)]
    stage = stage_of(modules, weights=Told(to=told))
    for k in range(2):
        stage.forward(k, hidden(), seed=0)
    assert told == ["before forward 0", "forward 0", "before forward 1", "forward 1"] * 2
    for k, done in enumerate(("done", "reduce")):
        told.clear()
        stage.backward(k, [torch.ones(3, WIDTH)], reduce=bool(k))
        one, zero = (f"{unit} of {k}" for unit in (1, 0))
        around = (f"before backward {one}", f"{done} {one}", f"before backward {zero}")
        assert told == [*around, f"{done} {zero}"]


def test_a_split_backward_is_announced_twice_and_done_once() -> None:
    told = Told()
    stage = stage_of([linear()], weights=told, split=True)
    stage.forward(3, hidden(), seed=0)
    stage.input_grad(3, [torch.ones(3, WIDTH)])
    stage.weight_grad(3, reduce=True)
    assert told.events == [
        "before forward 0",
        "before backward 0 of 3",
        "before weights 0 of 3",
        "reduce 0 of 3",
    ]


def test_evaluation_keeps_nothing_and_equals_the_units_without_dropout() -> None:
    modules = [linear(), nn.Dropout(0.5), Apply(two_outputs)]
    stage = stage_of(modules)
    x = hidden()
    stage.train(False)
    y, z = stage.evaluate(x, seed=0)
    expected = two_outputs(modules[0](x))
    assert torch.equal(y, expected[0]) and torch.equal(z, expected[1])
    assert not y.requires_grad and y.grad_fn is None and stage.in_flight == 0
    stage.train(True)
    assert all(module.training for module in modules)


def test_an_error_names_unit_and_stage_and_clear_forgets_what_was_kept() -> None:
    stage = stage_of([linear(), nn.Linear(WIDTH + 1, 2)])
    with pytest.raises(RuntimeError) as error:
        stage.forward(0, hidden(), seed=0)
    assert error.value.__notes__ == ["in unit 1 (Linear), stage 0"]
    stage.clear()
    assert stage.in_flight == 0
