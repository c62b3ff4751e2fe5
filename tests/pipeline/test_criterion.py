from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.pipeline.criterion import SumLoss, adds_up, as_sum, default_num_items
from parallel3d.tensor import vocab_parallel_cross_entropy
from parallel3d.topology import Axis

OUTPUT = torch.tensor([[0.4, -1.2, 2.0, 0.1], [1.5, 0.3, -0.7, 0.9], [0.2, 0.8, 0.6, -2.0]])
CLASSES = torch.tensor([2, 0, -100])
VALUES = OUTPUT.roll(1, 0).sigmoid()
SIGNS = VALUES.sub(0.5).sign()
PROBABILITIES = VALUES.softmax(1)
SETS = torch.tensor([[3, 0, -1, 1], [0, -1, 1, 2], [1, 2, 3, -1]])


def loss_of(output: Any, target: Any, loss_fn: Any = None, scale: float = 1.0) -> SumLoss:
    loss = SumLoss(loss_fn or as_sum(nn.MSELoss()))
    loss.begin([target], lambda: torch.tensor(scale, dtype=torch.float64))
    loss.forward(0, output)
    return loss


@pytest.mark.parametrize(
    ("loss_fn", "target"),
    [
        (nn.MSELoss(), VALUES),
        (nn.L1Loss(), VALUES),
        (nn.SmoothL1Loss(beta=0.3), VALUES),
        (nn.HuberLoss(delta=0.3), VALUES),
        (nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 5)), VALUES),
        (nn.PoissonNLLLoss(), VALUES),
        (nn.SoftMarginLoss(), SIGNS),
        (nn.HingeEmbeddingLoss(), SIGNS),
        (nn.KLDivLoss(log_target=False), PROBABILITIES),
        (nn.NLLLoss(), CLASSES),
        (nn.CrossEntropyLoss(), CLASSES),
        (nn.CrossEntropyLoss(ignore_index=2), torch.tensor([2, 0, 3])),
        (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES),
        (nn.CrossEntropyLoss(), PROBABILITIES),
        (nn.MultiMarginLoss(), torch.tensor([2, 0, 1])),
        (nn.MultiLabelMarginLoss(), SETS),
        (nn.MultiLabelSoftMarginLoss(), (VALUES > 0.5).float()),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
def test_a_mean_of_torch_is_its_sum_over_the_matching_count(
    loss_fn: nn.Module, target: Tensor
) -> None:
    expected = loss_fn(OUTPUT, target)
    total = as_sum(loss_fn)(OUTPUT, target)
    count = default_num_items(loss_fn)(target)
    torch.testing.assert_close(total / count, expected)
    assert loss_fn.reduction == "mean", "the caller's own loss was changed"


def test_items_are_floats_or_integers_that_are_not_ignored() -> None:
    count = default_num_items(nn.MSELoss(reduction="sum"))
    assert count(VALUES) == 12 and count(CLASSES) == 2 and count(torch.tensor([])) == 0
    assert default_num_items(partial(F.cross_entropy, ignore_index=0))(CLASSES) == 2
    assert default_num_items(nn.CrossEntropyLoss(ignore_index=2))(CLASSES) == 2


@pytest.mark.parametrize("target", [(CLASSES, VALUES), None, "text"], ids=["two", "none", "text"])
def test_other_targets_need_a_count_of_the_callers(target: Any) -> None:
    with pytest.raises(ValueError, match="pass num_items=fn"):
        default_num_items(nn.MSELoss())(target)


class Focal(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return output.sum()


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return output.sum() * self.temperature


@pytest.mark.parametrize(
    ("loss_fn", "match"),
    [
        (F.mse_loss, r"mse_loss reduces by 'mean': give it reduction='sum'"),
        (partial(F.cross_entropy, ignore_index=1), "reduces by 'mean'"),
        (partial(F.mse_loss, reduction="none"), "reduces by 'none'"),
        (Focal("mean"), "Focal reduces by 'mean'"),
        (nn.MSELoss(reduction="none"), r"MSELoss\(reduction='none'\) is not a sum"),
        (nn.KLDivLoss(reduction="batchmean"), "is not a sum"),
        (nn.CrossEntropyLoss(weight=torch.ones(4)), "is not a sum"),
        (partial(vocab_parallel_cross_entropy, reduction="mean"), "reduces by 'mean'"),
        (Learned(), "loss_fn has a parameter, temperature: put it into the model's last unit"),
    ],
)
def test_what_is_not_a_sum_is_refused_with_the_way_out(loss_fn: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        as_sum(loss_fn)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda output, target: F.mse_loss(output, target),
        lambda output, target: ((output - target) ** 2).sum() / len(target),
        lambda output, target: F.smooth_l1_loss(output, target, reduction="mean"),
    ],
)
def test_a_mean_that_does_not_say_so_is_found_by_a_sample_taken_twice(loss_fn: Any) -> None:
    with pytest.raises(ValueError, match=r"for a sample and .* it is a mean: it must return the S"):
        loss_of(OUTPUT, VALUES, loss_fn)


def test_a_loss_is_looked_at_a_few_times_at_most() -> None:
    calls = []

    def contrastive(output: Tensor, target: Tensor) -> Tensor:
        calls.append(len(output))
        if len(output) < 3:
            raise RuntimeError("of three or more")
        return output.sum()

    loss = SumLoss(contrastive)
    loss.begin([VALUES] * 9, lambda: torch.ones(()))
    for microbatch in range(9):
        loss.forward(microbatch, OUTPUT)
    assert calls.count(3) == 9 and calls.count(1) == 4


def test_a_loss_of_which_nothing_can_be_said_is_left_alone_until_it_can() -> None:
    masked = partial(F.cross_entropy, reduction="sum")
    assert not adds_up(masked, OUTPUT, torch.full((3,), -100))
    assert adds_up(masked, OUTPUT, CLASSES)
    assert not adds_up(lambda output, target: (output.view(3, 4) - target).sum(), OUTPUT, VALUES)
    assert not adds_up(masked, (OUTPUT,), CLASSES) and not adds_up(masked, OUTPUT[:0], CLASSES[:0])


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.MSELoss(reduction="sum"),
        Focal("sum"),
        partial(F.mse_loss, reduction="sum"),
        partial(vocab_parallel_cross_entropy, axis=Axis.single()),
        lambda output, target: (output - target).abs().sum(),
        torch.dist,
    ],
)
def test_a_sum_is_taken_as_it_is(loss_fn: Any) -> None:
    assert as_sum(loss_fn) is loss_fn


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch.ones(3), r"shape \(3,\)"),
        (torch.ones(1), r"shape \(1,\)"),
        (1.5, "float"),
        (None, "NoneType"),
        (torch.tensor(3), "torch.int64"),
        (torch.tensor(3.0, dtype=torch.bfloat16), "torch.bfloat16"),
    ],
    ids=["none", "one element", "number", "nothing", "integer", "narrow"],
)
def test_a_loss_that_is_no_scalar_sum_in_full_width_is_refused(value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"loss_fn returned {match}"):
        loss_of(OUTPUT, VALUES, lambda output, target: value)


def test_the_loss_is_scaled_once_and_added_up_unscaled() -> None:
    loss = SumLoss(as_sum(nn.MSELoss()))
    outputs = [OUTPUT.clone().requires_grad_(), (2 * OUTPUT).requires_grad_()]
    loss.begin([VALUES, VALUES], lambda: torch.tensor(1 / 24, dtype=torch.float64))
    for k, output in enumerate(outputs):
        loss.forward(k, output)
    for k, output in enumerate(outputs):
        (gradient,) = loss.backward(k)
        torch.testing.assert_close(gradient, (output.detach() - VALUES) / 12)
        assert output.grad is None
    expected = sum(((output.detach() - VALUES) ** 2).sum() for output in outputs)
    assert loss.total is not None
    torch.testing.assert_close(loss.total, torch.as_tensor(expected).double())


def test_narrow_outputs_are_widened_for_the_loss_and_get_narrow_gradients() -> None:
    seen: list[torch.dtype] = []

    def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
        seen.extend(tensor.dtype for tensor in output.values())
        return (output["y"] - target).square().sum()

    y = OUTPUT.bfloat16().requires_grad_()
    output = {"y": y, "ids": torch.arange(2), "wide": OUTPUT.double()}
    (gradient,) = loss_of(output, VALUES, loss_fn).backward(0)
    assert seen == [torch.float32, torch.int64, torch.float64]
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, (2 * (y.detach().float() - VALUES)).bfloat16())


def test_outputs_that_the_loss_does_not_use_get_zeros() -> None:
    outputs = (OUTPUT.clone().requires_grad_(), torch.rand(2, requires_grad=True), torch.rand(3))
    loss = loss_of(outputs, VALUES, lambda output, target: output[0].sum())
    first, second = loss.backward(0)
    assert torch.equal(first, torch.ones(3, 4)) and torch.equal(second, torch.zeros(2))
    loss = loss_of(outputs, VALUES, lambda output, target: target.sum())
    assert not any(gradient.any() for gradient in loss.backward(0))


def test_a_loss_may_work_in_place_on_its_input() -> None:
    output = OUTPUT.clone().requires_grad_()
    loss = loss_of(output, VALUES, lambda y, target: y.sub_(target).square().sum())
    torch.testing.assert_close(loss.backward(0)[0], 2 * (OUTPUT - VALUES))


def test_gradients_leave_contiguous() -> None:
    output = OUTPUT.clone().requires_grad_()
    weights = torch.rand(4, 3)
    loss = loss_of(output, VALUES, lambda y, target: (y.t() * weights).sum())
    assert loss.backward(0)[0].is_contiguous()


def test_evaluation_makes_no_graph() -> None:
    loss = SumLoss(as_sum(nn.MSELoss()))
    loss.begin([VALUES], None)
    loss.forward(0, OUTPUT.clone().requires_grad_())
    assert loss.total is not None and not loss.total.requires_grad
    with pytest.raises(KeyError):
        loss.backward(0)
