from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel3d.comm.ledger import Ledger
from parallel3d.placement import Shard
from parallel3d.tensor import vocab_parallel_cross_entropy
from parallel3d.topology import Axis, Grid, Topology
from tests.tensor.whole import TOLERANCE, drawn, error
from tests.world import run_on

SIZES = (3, 7, 8, 10, 11, 50257)


def slice_of(logits: Tensor, axis: Axis) -> Tensor:
    """This rank's columns of whole logits; padding is -inf, as the output head makes it."""
    local = -(-logits.shape[-1] // axis.size)
    padding = local * axis.size - logits.shape[-1]
    padded = F.pad(logits, (0, padding), value=-torch.inf)
    return padded.chunk(axis.size, -1)[axis.rank].detach().clone()


def targets(size: int, *shape: int) -> Tensor:
    target = torch.arange(torch.Size(shape).numel()).view(shape) * 5 % size
    target.view(-1)[-1] = size - 1
    return target


def loss_and_gradient(
    logits: Tensor, target: Tensor, axis: Axis, **options: Any
) -> tuple[Tensor, Tensor]:
    local = slice_of(logits, axis).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, axis=axis, **options)
    loss.backward(drawn(*loss.shape, seed=9).to(loss.dtype) if loss.ndim else None)
    assert local.grad is not None and local.grad.dtype == logits.dtype
    return loss.detach(), local.grad


def reference(logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    options = {"reduction": "sum", **options}
    whole = logits.detach().clone().requires_grad_()
    wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
    loss = F.cross_entropy(wide.flatten(0, -2), target.flatten(), **options)
    loss = loss.view(target.shape) if loss.ndim else loss
    loss.backward(drawn(*loss.shape, seed=9).to(loss.dtype) if loss.ndim else None)
    assert whole.grad is not None
    return loss.detach(), whole.grad


def every_case(axis: Axis) -> dict[str, float]:
    errors = {}
    for size in SIZES:
        logits = 10 * drawn(2, 3, size)
        target = targets(size, 2, 3)
        some = target.clone().view(-1).index_fill(0, torch.tensor([1, 4]), -100).view(2, 3)
        for name, options in {
            "sum": {},
            "mean": {"reduction": "mean"},
            "none": {"reduction": "none"},
            "index 0 ignored": {"ignore_index": 0, "reduction": "mean"},
        }.items():
            for labels in (target, some):
                if name == "index 0 ignored" and labels is some:
                    continue
                loss, grad = loss_and_gradient(logits, labels, axis, **options)
                expected, whole = reference(logits, labels, **options)
                used = Shard(0, (size,)).pieces(axis.size, axis.rank)[0]
                case = f"{size} {name} {'some' if labels is some else 'all'}"
                errors[f"{case}: loss"] = error(loss, expected)
                own = whole.narrow(-1, used.whole, used.length)
                errors[f"{case}: gradient"] = error(grad[..., : used.length], own)
                assert not grad[..., used.length :].any(), "padding gets no gradient"
                if labels is some:
                    assert not grad.view(6, -1)[[1, 4]].any(), "ignored rows get exactly none"
                    assert name != "none" or not loss.view(-1)[[1, 4]].any()
    return errors


def every_case_on(topology: Topology) -> dict[str, float]:
    return every_case(topology.tp)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_the_loss_equals_cross_entropy_on_the_joined_logits(tp: int) -> None:
    for errors in run_on(Grid(tp=tp), every_case_on):
        assert not {case: e for case, e in errors.items() if e > TOLERANCE}
        assert len(errors) == 14 * len(SIZES)


def test_over_one_rank_the_loss_is_exactly_cross_entropy() -> None:
    assert set(every_case(Axis.single()).values()) == {0.0}


def all_ignored(topology: Topology) -> None:
    logits, target = drawn(4, 10), torch.full((4,), -100)
    for reduction in ("sum", "none"):
        loss, grad = loss_and_gradient(logits, target, topology.tp, reduction=reduction)
        assert not loss.any() and not grad.any()
    loss, _ = loss_and_gradient(logits, target, topology.tp, reduction="mean")
    assert torch.isnan(loss), "0 / 0, as F.cross_entropy"
    loss, grad = loss_and_gradient(drawn(0, 10), torch.empty(0, dtype=torch.int64), topology.tp)
    assert float(loss) == 0 and grad.shape[0] == 0


def wide_range(topology: Topology) -> None:
    """Neither large logits nor half precision lose the sum."""
    axis = topology.tp
    logits = torch.tensor([[1e4, -1e4, 0.0, 9e3], [-1e30, -1e30, -1e30, -1e30]]).double()
    target = torch.tensor([3, 1])
    expected, whole = reference(logits, target)
    loss, grad = loss_and_gradient(logits, target, axis)
    assert error(loss, expected) <= TOLERANCE and error(grad, slice_of(whole, axis)) <= TOLERANCE
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits, target = drawn(6, 12).to(dtype), targets(12, 6)
        expected, whole = reference(logits, target)
        loss, grad = loss_and_gradient(logits, target, axis)
        assert loss.dtype == torch.float32 and error(loss, expected) < 1e-6
        assert error(grad, slice_of(whole, axis)) <= torch.finfo(dtype).eps


def out_of_range(topology: Topology) -> list[str]:
    """Labels in the padding (10, 11 over 4 ranks), beyond it, and negative ones."""
    logits, messages = drawn(3, 10), []
    for label in (10, 11, 12, 400, -1, -101):
        local = slice_of(logits, topology.tp)
        with pytest.raises(IndexError) as raised:
            vocab_parallel_cross_entropy(local, torch.tensor([1, label, 9]), axis=topology.tp)
        messages.append(str(raised.value))
    return messages


def own_infinity(topology: Topology) -> None:
    """A logit of the vocabulary that is -inf is no padding: its loss is infinite, no error."""
    logits = drawn(3, 10)
    logits[1, 9] = logits[0, 2] = -torch.inf
    target = torch.tensor([2, 9, 4])
    local = slice_of(logits, topology.tp)
    found = vocab_parallel_cross_entropy(local, target, axis=topology.tp, reduction="none")
    assert torch.isinf(found).tolist() == [True, True, False]


def edges(topology: Topology) -> list[str]:
    all_ignored(topology)
    wide_range(topology)
    own_infinity(topology)
    return out_of_range(topology)


@pytest.mark.report("pytorch/torchtitan#4297")
def test_a_label_outside_the_vocabulary_raises_index_error_on_all_ranks() -> None:
    expected = [f"Target {label} is out of bounds." for label in (10, 11, 12, 400, -1, -101)]
    for tp in (1, 2, 4):
        assert run_on(Grid(tp=tp), edges) == [expected] * tp


def sent(topology: Topology) -> dict[str, int]:
    local, ledger = drawn(2, 5, 6).requires_grad_(), Ledger()
    ledger.attach(topology.tp)
    loss = vocab_parallel_cross_entropy(local, targets(12, 2, 5), axis=topology.tp)
    forward = ledger.bytes()
    loss.backward()
    assert ledger.bytes() == forward, "the backward pass sends nothing"
    return forward


def test_the_loss_sends_three_numbers_per_target() -> None:
    assert run_on(Grid(tp=2), sent) == [{"tp": 3 * 10 * 8}] * 2


@pytest.mark.parametrize("axis", [Axis.single(), Axis("tp", 2, 0, (0, 1))])
def test_wrong_arguments_are_refused_before_anything_is_sent(axis: Axis) -> None:
    logits = drawn(2, 3, 5)
    with pytest.raises(ValueError, match="reduction = 'avg' is not one of sum, mean, none"):
        vocab_parallel_cross_entropy(logits, targets(5, 2, 3), axis=axis, reduction="avg")
    with pytest.raises(ValueError, match=r"target of shape \(3, 2\) does not fit logits of shape"):
        vocab_parallel_cross_entropy(logits, targets(5, 3, 2), axis=axis)
