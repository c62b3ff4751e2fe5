"""A flat buffer that keeps its shard only, and gradients that are lent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from parallel3d.placement import Replicate
from parallel3d.topology import Axis
from parallel3d.zero.flat import Flat, Held
from parallel3d.zero.shards import Shards

CPU = torch.device("cpu")


def sharded(
    *parameters: nn.Parameter, stage: int = 3, trained: bool = True, of: Flat | None = None
) -> Flat:
    held = [Held(str(at), each, Replicate(), at, 0) for at, each in enumerate(parameters)]
    dtype = parameters[0].dtype
    return Flat(held, Axis.single("dp"), CPU, dtype=dtype, stage=stage, trained=trained, of=of)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))


def memory(flat: Flat) -> int:
    return flat.data.untyped_storage().nbytes()


def test_a_released_parameter_has_no_memory_and_reads_as_nan() -> None:
    parameter = weight()
    before = parameter.detach().clone()
    flat = sharded(parameter)
    assert memory(flat) == 0 and parameter.shape == before.shape
    assert parameter.isnan().all() and linear(torch.ones(2, 3), parameter).isnan().all()
    flat.gather("").wait()
    assert parameter.isnan().all(), "not before it is shown"
    flat.show()
    assert torch.equal(parameter, before) and memory(flat) == flat.nbytes == 64 * 4
    flat.release()
    assert memory(flat) == 0 and parameter.isnan().all()
    assert flat.shard.untyped_storage().nbytes() == 64 * 4, "the shard holds nothing else"


def test_gradients_do_not_see_that_a_weight_was_away_between_forward_and_backward() -> None:
    x, parameter = torch.randn(2, 4, 3, requires_grad=True), weight()
    plain = parameter.detach().clone().requires_grad_()
    (linear(x, plain) ** 2).sum().backward()
    assert x.grad is not None
    expected, x.grad = x.grad, None
    flat = sharded(parameter)
    flat.gather("").wait()
    flat.show()
    output = (linear(x, parameter) ** 2).sum()  # keeps a transposed view of the weight
    flat.release()
    flat.gather("").wait()
    flat.show()
    flat.lend(torch.zeros(flat.length))
    output.backward()
    flat.check()
    assert torch.equal(x.grad, expected)
    assert parameter.grad is not None and torch.equal(parameter.grad, plain.grad)
    flat.take_back()
    assert parameter.grad is None and flat.grad is None


WRITES: dict[str, Callable[[nn.Parameter], object]] = {
    "fill": lambda parameter: parameter.fill_(5),
    "one element": lambda parameter: parameter.view(-1)[0].fill_(5),
    "other memory": lambda parameter: setattr(parameter, "data", torch.ones(parameter.shape)),
}


@pytest.mark.report("deepspeedai/Megatron-DeepSpeed#193")
@pytest.mark.report("deepspeedai/DeepSpeed#7817")
@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_a_write_that_would_be_lost_raises(write: str, shown: bool) -> None:
    parameter = weight()
    flat = sharded(parameter)
    flat.gather("").wait()
    if shown:
        flat.show()
    WRITES[write](parameter)
    with pytest.raises(
        RuntimeError,
        match="0 was written to or replaced, but at .* inside of engine.parts.shards.edit",
    ):
        flat.release() if shown else flat.show()


@torch.no_grad()
def test_most_writes_to_a_released_parameter_raise_at_once() -> None:
    parameter = weight()
    sharded(parameter)
    for write in (lambda: parameter.copy_(torch.ones(5, 3)), lambda: parameter.add_(1)):
        with pytest.raises(RuntimeError, match="single memory location"):
            write()


@pytest.mark.report("deepspeedai/Megatron-DeepSpeed#193")
@pytest.mark.report("deepspeedai/DeepSpeed#7817")
def test_inside_of_edit_parameters_may_be_written() -> None:
    parameter = weight()
    flat = sharded(parameter)
    shards = Shards({0: [flat]})
    with shards.edit():
        parameter.fill_(5)
    assert flat.shard[:15].eq(5).all() and flat.master is flat.shard
    assert parameter.isnan().all()
    shards.settle()
    assert parameter.eq(5).all()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_edit_leaves_wide_masters_alone_where_nothing_was_written(stage: int) -> None:
    parameter = nn.Parameter(weight().detach().bfloat16())
    flat = sharded(parameter, stage=stage)
    flat.master.mul_(1 + 2**-12)
    shards = Shards({0: [flat]})
    shards.publish()
    wide = flat.master.clone()
    with shards.edit():
        parameter[0].fill_(5)
    assert flat.master[:3].eq(5).all() and torch.equal(flat.master[3:], wide[3:])
    assert not torch.equal(wide, wide.bfloat16().float()), "wider than the values"


def test_a_parameter_that_numpy_has_seen_keeps_its_memory_and_goes_on() -> None:
    parameter = weight()
    flat = sharded(parameter)
    flat.gather("").wait()
    flat.show()
    array = parameter.detach().numpy()
    flat.release()
    assert memory(flat) == flat.nbytes and parameter.isnan().all()
    flat.shard.fill_(7)
    flat.gather("").wait()
    flat.show()
    assert parameter.eq(7).all() and (array == 7).all()


def test_uses_of_one_parameter_are_shown_and_hidden_together() -> None:
    one, two = weight(), weight()
    first = sharded(one)
    second = sharded(two, of=first)
    assert second.home is first and two.isnan().all()
    first.gather("").wait()
    first.show()
    assert two.data_ptr() == one.data_ptr() == first.data.data_ptr()
    second.lend(torch.zeros(64))
    assert one.grad is None and two.grad is not None
    first.release()
    assert one.isnan().all() and two.isnan().all()


def test_a_frozen_parameter_of_whole_numbers_is_kept_as_it_is() -> None:
    parameter = nn.Parameter(torch.arange(5), requires_grad=False)
    flat = sharded(parameter, trained=False)
    assert parameter.tolist() == [0] * 5 and flat.master is flat.shard
    assert parameter.grad is None and flat.shard.dtype == torch.int64
    flat.gather("").wait()
    flat.show()
    assert parameter.tolist() == [0, 1, 2, 3, 4]


def test_masters_are_apart_from_narrow_shards_only() -> None:
    narrow = nn.Parameter(torch.full((3,), 1.001))
    held = [Held("w", narrow, Replicate(), 0, 0)]
    flat = Flat(held, Axis.single("dp"), CPU, dtype=torch.bfloat16, stage=3)
    assert flat.shard.dtype == torch.bfloat16 and flat.master.dtype == torch.float32
    assert flat.master[0] == torch.tensor(1.001) != flat.shard[0].float()
    wide = sharded(weight())
    assert wide.master is wide.shard


@pytest.mark.parametrize("stage", [2, 3])
def test_between_steps_gradients_are_owned_only(stage: int) -> None:
    parameter = weight()
    held = [Held("w", parameter, Replicate(), 0, 0)]
    flat = Flat(held, Axis("dp", 2, 1, (0, 1)), CPU, dtype=torch.float32, stage=stage)
    assert parameter.grad is None and flat.grad is None
    assert len(flat.owned_grad) == 64 and flat.length == 128
    assert flat.owned_grad.untyped_storage().nbytes() == 64 * 4
    flat.check()
    parameter.grad = torch.zeros(5, 3)
    with pytest.raises(RuntimeError, match="gradient of w was replaced"):
        flat.check()
