from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.batch import Batch, check_same, shapes_of, split, to_device
from parallel3d.topology import Grid, Topology
from tests.world import run_on

CPU = torch.device("cpu")


def column(size: int) -> Tensor:
    return torch.arange(size)[:, None]


@pytest.mark.report("pytorch/pytorch#126600")
@pytest.mark.parametrize(("size", "sizes"), [(7, [3, 2, 2]), (3, [1, 1, 1]), (8, [3, 3, 2])])
def test_a_batch_is_cut_as_tensor_split_does(size: int, sizes: list[int]) -> None:
    batch = split(column(size), column(size) + 1, 3, training=True)
    assert [len(x) for x in batch.inputs] == sizes
    assert torch.equal(torch.cat(batch.inputs), column(size))
    for x, target in zip(batch.inputs, batch.targets, strict=True):
        assert torch.equal(target, x + 1)


def test_pytrees_are_cut_leaf_by_leaf_and_what_has_no_dim_goes_to_all() -> None:
    x = {"ids": column(4), "pair": (torch.ones(4, 2), None), "scale": torch.tensor(3.0), "flag": 1}
    for part in split(x, column(4), 2, training=True).inputs:
        assert part["ids"].shape == (2, 1) and part["pair"][0].shape == (2, 2)
        assert part["pair"][1] is None and part["scale"] == 3 and part["flag"] == 1


def test_x_may_be_none_where_it_is_not_needed() -> None:
    assert split(None, column(5), 2, training=True).inputs == [None, None]


@pytest.mark.report("ml-explore/mlx-lm#1413")
def test_a_list_is_taken_as_ready_microbatches_of_any_number_and_size() -> None:
    pairs = [(column(3), column(3)), [column(1), column(1)], (None, column(2))]
    batch = split(pairs, None, 4, training=True)
    assert [len(target) for target in batch.targets] == [3, 1, 2]
    assert batch.inputs[2] is None


@pytest.mark.parametrize(
    ("x", "target", "match"),
    [
        (column(2), column(2), r"batch of 2 cannot be cut into num_microbatches = 3.*=2"),
        (column(6), column(5), "x has 6 samples along dim 0, but target has 5"),
        ((column(6), column(5)), column(6), "tensors of x must have one size .*, found 5, 6"),
        (column(6), None, "tensors of target must have one size along dim 0, found none"),
        (column(6), torch.tensor(1), "target must have one size along dim 0, found none"),
        ([(column(2), column(2))], column(2), "either a list of .* or x and target"),
        ([column(2), column(2)], None, "a list must be of .x, target. microbatches"),
        ([], None, "an empty list of microbatches"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_sizes(x: Any, target: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        split(x, target, 3, training=True)


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_evaluation_takes_a_batch_of_any_size(size: int) -> None:
    batch = split(column(size), column(size), 3, training=False)
    assert len(batch.targets) == len(batch.inputs) == min(size, 3)
    assert sum(map(len, batch.targets)) == size
    assert split([], None, 3, training=False) == Batch([], [])


def test_floating_inputs_take_the_models_dtype_and_targets_keep_theirs() -> None:
    x = {"values": torch.ones(2, dtype=torch.float64), "ids": column(2), "z": torch.ones(2) * 1j}
    target = (torch.ones(2, dtype=torch.float64), column(2))
    batch = to_device(Batch([x], [target]), CPU, torch.bfloat16, first=True)
    (got,), (wanted,) = batch.inputs, batch.targets
    assert got["values"].dtype == torch.bfloat16 and got["ids"].dtype == torch.int64
    assert got["z"].dtype == torch.complex64
    assert [tensor.dtype for tensor in wanted] == [torch.float64, torch.int64]
    assert to_device(Batch([x], [target]), CPU, torch.bfloat16, first=False).inputs == [None]


def test_no_gradient_leaves_through_the_batch() -> None:
    x = torch.ones(2, requires_grad=True) * 2
    batch = to_device(Batch([x], [x]), CPU, torch.float32, first=True)
    assert not batch.inputs[0].requires_grad and not batch.targets[0].requires_grad


def test_shapes_are_told_apart_and_values_are_not() -> None:
    one, two, three = torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(3, 2)
    pairs = [one, two, three, one.double(), (one,), [one], {"a": one}, {"b": one}, (one, None)]
    numbers = shapes_of(Batch(pairs, pairs))
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == len(numbers) - 1


MESSAGES = {
    "equal": None,
    "x is None off the first stage": None,
    "another x": "the ranks of dp index 1 were given different x: all pp and tp ranks of one dp",
    "another shape of x": "the ranks of dp index 1 were given different x: all pp and tp ranks",
    "another target": "the ranks of dp index 1 were given different target: all pp and tp ranks",
    "another count": "ranks were given 2, 3 microbatches: every dp rank runs the same number",
}


def told(topology: Topology) -> list[str | None]:
    """What is said where every rank of a dp index passes the same batch, but for the case."""
    messages = []
    for case in MESSAGES:
        torch.manual_seed(topology.dp.rank)
        x, target, count = torch.rand(4, 2), torch.rand(4, 2), 2
        if topology.rank == topology.world.size - 1:
            x = x + 1 if case == "another x" else x
            x = x[..., None] if case == "another shape of x" else x
            target = target.double() if case == "another target" else target
            count = 3 if case == "another count" else count
        given = None if "None" in case and topology.pp.rank else x
        message = None
        try:
            check_same(split(given, target, count, training=True), topology)
        except ValueError as error:
            message = str(error)
        messages.append(message)
    return messages


def test_ranks_that_were_given_different_batches_are_told_on_every_rank() -> None:
    for messages in run_on(Grid(pp=2, dp=2), told):
        for (case, start), message in zip(MESSAGES.items(), messages, strict=True):
            assert message == start or (message and message.startswith(start)), case
