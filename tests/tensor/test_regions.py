from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from parallel3d.comm.collectives import all_gather, all_reduce
from parallel3d.comm.ledger import Ledger
from parallel3d.tensor import copy_to, gather_from, reduce_from, split_to
from parallel3d.topology import Axis, Grid, Topology
from tests.tensor.whole import drawn
from tests.world import run_on

SIZE = 3


def same_on_all(x: Tensor, axis: Axis) -> bool:
    return all(torch.equal(x, other) for other in all_gather(x.unsqueeze(0), axis, 0))


def gradchecks(topology: Topology) -> None:
    """Between a pair of doors each rank does something of its own; outside all are equal."""
    axis = topology.tp
    own = drawn(4, 3 * SIZE, seed=axis.rank)

    def summed(x: Tensor) -> Tensor:
        return reduce_from(torch.sin(own * copy_to(x, axis)), axis)

    def joined_last(x: Tensor) -> Tensor:
        return gather_from(torch.sin((axis.rank + 1) * split_to(x, axis)), axis)

    def joined_first(x: Tensor) -> Tensor:
        return gather_from(torch.sin((axis.rank + 1) * split_to(x, axis, 0)), axis, 0)

    def mixed(x: Tensor) -> Tensor:
        return gather_from(own[:, :2] * copy_to(x, axis)[:, :2], axis)

    def summed_slices(x: Tensor) -> Tensor:
        return reduce_from(split_to(x, axis) ** 2 * own[:, :3], axis)

    whole = drawn(4, 3 * SIZE, seed=9).requires_grad_()
    by_rows = drawn(2 * SIZE, 2, seed=9).requires_grad_()
    for function in (summed, joined_last, mixed, summed_slices):
        assert same_on_all(function(whole).detach(), axis)
        assert gradcheck(function, whole)
    assert gradcheck(joined_first, by_rows)


def adjoint(topology: Topology) -> None:
    """A door's backward is the transpose of its forward, as maps between the ranks' spaces.

    A whole tensor is one vector however many ranks hold it, so its product counts once.
    """
    axis = topology.tp
    whole, cut = drawn(4, 2 * SIZE, seed=20), drawn(4, 2, seed=axis.rank)
    each = drawn(4, 2 * SIZE, seed=axis.rank)

    def over_ranks(a: Tensor, b: Tensor) -> float:
        return float(all_reduce((a * b).sum(), axis))

    def once(a: Tensor, b: Tensor) -> float:
        assert same_on_all(a, axis) and same_on_all(b, axis)
        return float((a * b).sum())

    for door, x, y, product_in, product_out in (
        (copy_to, whole, each, once, over_ranks),
        (reduce_from, each, whole, over_ranks, once),
        (split_to, whole, cut, once, over_ranks),
        (gather_from, cut, whole, over_ranks, once),
    ):
        leaf = x.clone().requires_grad_()
        result = door(leaf, axis)
        result.backward(y)
        assert leaf.grad is not None
        difference = product_out(result.detach(), y) - product_in(x, leaf.grad)
        assert abs(difference) < 1e-12, door.__name__


def neither_input_nor_gradient_is_overwritten(topology: Topology) -> None:
    axis = topology.tp
    x, beside = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    (copy_to(x, axis) + beside).sum().backward()
    assert x.grad is not None and beside.grad is not None
    assert x.grad.tolist() == [SIZE] * 3 and beside.grad.tolist() == [1.0] * 3
    partial = torch.ones(3)
    assert reduce_from(partial, axis).tolist() == [SIZE] * 3 and partial.tolist() == [1.0] * 3


def sent(topology: Topology) -> None:
    axis, ledger = topology.tp, Ledger()
    ledger.attach(axis)
    whole, part = 2 * 2 * SIZE * 8, 2 * 2 * 8
    for door, width, forward, backward in (
        (copy_to, 2 * SIZE, 0, 2 * whole * (SIZE - 1) // SIZE),
        (reduce_from, 2 * SIZE, 2 * whole * (SIZE - 1) // SIZE, 0),
        (split_to, 2 * SIZE, 0, part * (SIZE - 1)),
        (gather_from, 2, part * (SIZE - 1), 0),
    ):
        ledger.reset()
        y = door(drawn(2, width).requires_grad_(), axis)
        assert sum(ledger.bytes().values()) == forward, door.__name__
        y.sum().backward()
        assert sum(ledger.bytes().values()) == forward + backward, door.__name__


def doors(topology: Topology) -> None:
    for check in (gradchecks, adjoint, neither_input_nor_gradient_is_overwritten, sent):
        check(topology)


def test_each_conjugate_pair_is_right_in_forward_and_backward() -> None:
    run_on(Grid(tp=SIZE), doors)


def test_on_an_axis_of_one_rank_the_doors_are_open() -> None:
    x = torch.ones(2, 2)
    for door in (copy_to, reduce_from, split_to, gather_from):
        assert door(x, Axis.single()) is x


def test_a_dim_that_does_not_divide_is_not_split() -> None:
    with pytest.raises(ValueError, match=r"dim -1 of a tensor of shape \(2, 5\) does not divide"):
        split_to(torch.ones(2, 5), Axis("tp", 2, 0, (0, 1)))
