from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from parallel3d.pipeline.border import Border
from tests.pipeline.links import Queue, both_ends
from tests.pipeline.units import same

TRAINING, EVALUATION = (True, 1), (False, 1)


def cross(sender: Border, receiver: Border, y: Any, key: tuple[bool, int] = TRAINING) -> Any:
    sender.send_forward(y, key)
    return receiver.post_forward(key)()


@pytest.mark.report("pytorch/pytorch#183582")
@pytest.mark.report("pytorch/PiPPy#941")
@pytest.mark.parametrize(
    "dtype",
    "bool uint8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128".split(),
)
def test_a_tensor_of_any_dtype_arrives_as_it_is(dtype: str) -> None:
    tensor = torch.tensor([[0.0, 1.0, -2.0]]).to(getattr(torch, dtype))
    got = cross(*both_ends(), tensor)
    assert same(got, tensor) and got.shape == (1, 3) and not got.requires_grad


@pytest.mark.report("deepspeedai/DeepSpeed#969")
def test_pytrees_arrive_whole_and_only_what_needs_a_gradient_asks_for_one() -> None:
    y = {
        "states": (torch.rand(2, 3, requires_grad=True), torch.rand(2)),
        "ids": [torch.arange(4), None],
        "mask": torch.tensor(True),
        "nothing": torch.empty(0, 3, requires_grad=True),
        "none": None,
    }
    got = cross(*both_ends(), y)
    (leaves, spec), (expected, expected_spec) = tree_flatten(got), tree_flatten(y)
    assert spec == expected_spec and all(map(same, leaves, expected))
    needs = [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)]
    assert needs == [True, False, False, False, True]


def test_what_is_received_is_described_once_for_each_key() -> None:
    sender, receiver = both_ends()
    channel = sender.activations
    assert isinstance(channel, Queue)
    for _ in range(3):
        assert cross(sender, receiver, torch.ones(2)).shape == (2,)
        assert cross(sender, receiver, torch.ones(3), key=(True, 7)).shape == (3,)
        assert cross(sender, receiver, torch.ones(2), key=EVALUATION).shape == (2,)
    assert channel.described == 3


def test_receives_of_known_shapes_are_posted_ahead_and_keep_their_order() -> None:
    sender, receiver = both_ends()
    cross(sender, receiver, torch.zeros(2))
    waits = [receiver.post_forward(TRAINING) for _ in range(2)]
    for value in (1.0, 2.0):
        sender.send_forward(torch.full((2,), value), TRAINING)
    assert [wait().tolist() for wait in waits] == [[1, 1], [2, 2]]


@pytest.mark.report("deepspeedai/DeepSpeed#4777")
@pytest.mark.parametrize(
    "other",
    [torch.ones(3), torch.ones(2, dtype=torch.float64), None],
    ids=["shape", "dtype", "none"],
)
def test_an_output_that_is_not_like_the_last_of_its_key_is_an_error(other: Tensor | None) -> None:
    sender, receiver = both_ends()
    cross(sender, receiver, torch.ones(2))
    with pytest.raises(RuntimeError, match=r"stage 0 gives .*\(2,\) torch.float32 before") as error:
        sender.send_forward(other, TRAINING)
    shown = str(error.value).split("gives ")[1].split(" where ")[0]
    assert f"gave {shown} before" not in str(error.value), "the message does not tell them apart"


@pytest.mark.parametrize(
    "value", [3, 2.5, True, "text", object(), {1, 2}], ids=lambda value: type(value).__name__
)
def test_what_is_neither_tensor_nor_none_is_refused_with_its_stage(value: Any) -> None:
    sender, _ = both_ends(index=2)
    match = f"stage 1 gives a {type(value).__name__} to stage 2"
    with pytest.raises(TypeError, match=match):
        sender.send_forward((torch.ones(1), value), TRAINING)


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


def test_named_tuples_and_ordered_dicts_arrive_as_what_they_were() -> None:
    got = cross(*both_ends(), OrderedDict(b=Pair(torch.ones(1), torch.zeros(2)), a=torch.ones(3)))
    assert isinstance(got, OrderedDict) and list(got) == ["b", "a"]
    assert isinstance(got["b"], Pair) and got["b"].other.tolist() == [0, 0]


def test_a_dict_in_another_order_is_not_taken_for_the_one_before() -> None:
    sender, receiver = both_ends()
    cross(sender, receiver, {"a": torch.ones(1), "b": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="must depend on the shapes"):
        sender.send_forward({"b": torch.zeros(1), "a": torch.ones(1)}, TRAINING)


@dataclass
class Record:
    field: Tensor


def test_an_unknown_container_is_refused_with_its_stage() -> None:
    with pytest.raises(TypeError, match="stage 0 gives a Record to stage 1"):
        both_ends()[0].send_forward(Record(torch.ones(1)), TRAINING)


def test_gradients_come_back_for_what_needed_one_in_order() -> None:
    sender, receiver = both_ends()
    y = (torch.rand(2, requires_grad=True), torch.arange(3), torch.rand(4, requires_grad=True))
    outputs = sender.send_forward(y, TRAINING)
    assert [tuple(output.shape) for output in outputs] == [(2,), (4,)]
    assert all(output.is_meta for output in outputs), "the output itself is not kept"
    wait = sender.post_backward(outputs)
    receiver.send_backward([torch.full((2,), 5.0), torch.full((4,), 6.0)])
    assert [gradient.tolist() for gradient in wait()] == [[5.0] * 2, [6.0] * 4]


def test_what_is_received_may_be_worked_on_in_place_without_touching_what_was_sent() -> None:
    sender, receiver = both_ends()
    y = torch.ones(2)
    cross(sender, receiver, y).zero_()
    assert y.tolist() == [1, 1]


def sent(border: Border) -> list[Tensor]:
    assert isinstance(border.activations, Queue)
    return list(border.activations.tensors)


def floats(*needs: bool) -> tuple[Tensor, ...]:
    return tuple(torch.rand(2 + at, requires_grad=need) for at, need in enumerate(needs))


@pytest.mark.parametrize("key", [TRAINING, EVALUATION], ids=["training", "evaluation"])
def test_one_leaf_that_needs_a_gradient_travels_without_flags(key: tuple[bool, int]) -> None:
    sender, _ = both_ends()
    for _ in range(2):
        sender.send_forward((torch.rand(2, requires_grad=True), torch.arange(3), None), key)
    assert [tensor.shape for tensor in sent(sender)] == [(2,), (3,)] * 2


@pytest.mark.parametrize("needs", [(), (False,), (True, False), (True, True), (False, False)])
def test_what_needs_a_gradient_may_change_with_every_message(needs: tuple[bool, ...]) -> None:
    sender, receiver = both_ends()
    cross(sender, receiver, floats(*needs))
    for at in range(2 ** len(needs)):
        changed = [bool(at >> bit & 1) for bit in range(len(needs))]
        y = floats(*changed)
        outputs = sender.send_forward(y, TRAINING)
        got = receiver.post_forward(TRAINING)()
        assert [leaf.requires_grad for leaf in got] == changed
        assert all(map(same, got, y))
        assert [tuple(o.shape) for o in outputs] == [
            tuple(leaf.shape) for leaf in got if leaf.requires_grad
        ]
        wait = sender.post_backward(outputs)
        receiver.send_backward([torch.full_like(leaf, at) for leaf in got if leaf.requires_grad])
        assert [gradient.shape for gradient in wait()] == [output.shape for output in outputs]


def test_flags_are_a_byte_for_each_leaf_that_could_need_a_gradient_and_only_in_training() -> None:
    sender, _ = both_ends()
    y = {"a": torch.rand(2), "ids": torch.arange(3), "b": torch.rand(1, requires_grad=True)}
    sender.send_forward(y, TRAINING)
    flags, *_ = sent(sender)
    assert flags.dtype == torch.uint8 and flags.tolist() == [0, 1]
    sender, _ = both_ends()
    sender.send_forward(y, EVALUATION)
    assert [tensor.dtype for tensor in sent(sender)] == [torch.float32, torch.int64, torch.float32]


def test_a_gradient_that_comes_back_for_nothing_is_dropped() -> None:
    sender, receiver = both_ends()
    cross(sender, receiver, floats(True))
    outputs = sender.send_forward(floats(False), TRAINING)
    (got,) = receiver.post_forward(TRAINING)()
    assert got.requires_grad
    wait = sender.post_backward(outputs)
    receiver.send_backward([torch.ones(2)])
    assert wait() == []
    assert isinstance(sender.gradients, Queue) and not sender.gradients.tensors, "it was received"


def test_in_evaluation_nothing_that_arrives_needs_a_gradient() -> None:
    sender, receiver = both_ends()
    assert sender.send_forward(floats(True, False), EVALUATION) == []
    assert not any(leaf.requires_grad for leaf in receiver.post_forward(EVALUATION)())
