from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.comm.collectives import (
    Pending,
    all_gather,
    all_gather_objects,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object,
    gather_objects,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from parallel3d.topology import Axis, Grid, Topology
from tests.world import run_on

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SUMMABLE = (*FLOATING, torch.int64, torch.int32)
SIZE = 3


def drawn(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that another order of a sum has other bits."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if dtype.is_floating_point:
        return (x * 10 ** torch.randint(-2, 3, shape, generator=generator)).to(dtype)
    return (100 * x).to(dtype)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total = total + part
    return total


def reduce_scatter_in_rank_order(topology: Topology) -> None:
    axis = topology.tp
    for dtype in SUMMABLE:
        every = [drawn(rank, (SIZE * 64,), dtype) for rank in range(SIZE)]
        out = torch.empty(64, dtype=dtype)
        pending = start_reduce_scatter(every[axis.rank], out, axis)
        assert pending.wait() is out and pending.wait() is out
        assert torch.equal(out, in_rank_order(every).view(SIZE, -1)[axis.rank]), dtype
        assert torch.equal(every[axis.rank], drawn(axis.rank, (SIZE * 64,), dtype)), "input kept"
        own = every[axis.rank].view(SIZE, -1)[axis.rank]
        assert torch.equal(start_reduce_scatter(every[axis.rank], own, axis).wait(), out)


def reduce_scatter_of_a_narrow_wire(topology: Topology) -> None:
    """Every part is rounded, also this rank's own; the sum of them is not."""
    axis = topology.tp
    heard: list[int] = []
    axis.observers.append(lambda event: heard.append(event.bytes))
    for dtype in (torch.float32, torch.float64):
        every = [drawn(rank, (SIZE * 64,), dtype) for rank in range(SIZE)]
        for wire in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            heard.clear()
            own = every[axis.rank].clone().view(SIZE, -1)[axis.rank]
            start_reduce_scatter(every[axis.rank], own, axis, wire=wire).wait()
            rounded = wire.itemsize < dtype.itemsize
            parts = [part.to(wire).to(dtype) if rounded else part for part in every]
            assert torch.equal(own, in_rank_order(parts).view(SIZE, -1)[axis.rank])
            width = wire.itemsize if rounded else dtype.itemsize
            assert sum(heard) == 64 * (SIZE - 1) * width


def all_reduce_every_dtype(topology: Topology) -> None:
    axis = topology.tp
    for dtype in SUMMABLE:
        every = [drawn(rank, (5, 7), dtype) for rank in range(SIZE)]
        x = every[axis.rank].clone()
        assert all_reduce(x, axis) is x, "in place"
        same = all_gather(x.unsqueeze(0), axis, 0)
        assert all(torch.equal(x, other) for other in same), f"{dtype}: ranks differ in bits"
        expected = in_rank_order([part.double() for part in every])
        tolerance = 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        scale = sum(part.double().abs() for part in every)
        assert ((x.double() - expected).abs() <= tolerance * scale).all(), dtype
        peak = all_reduce(every[axis.rank].clone(), axis, op="max")
        assert torch.equal(peak, torch.stack(every).amax(0)), dtype
    across = drawn(axis.rank, (4, 3), torch.float64).t()
    expected = in_rank_order([drawn(rank, (4, 3), torch.float64).t() for rank in range(SIZE)])
    torch.testing.assert_close(all_reduce(across, axis), expected, rtol=1e-14, atol=1e-14)


def gather_every_dtype(topology: Topology) -> None:
    axis = topology.tp
    for dtype in (*SUMMABLE, torch.bool, torch.complex64):
        every = [drawn(rank, (2, 3, 4), torch.float64).to(dtype) for rank in range(SIZE)]
        for dim in (0, 1, 2, -1):
            whole = all_gather(every[axis.rank], axis, dim)
            assert whole.dtype == dtype and torch.equal(whole, torch.cat(every, dim))
        across = [part.transpose(0, 2) for part in every]
        assert torch.equal(all_gather(across[axis.rank], axis, 1), torch.cat(across, 1))
        out = torch.zeros(SIZE * 24, dtype=dtype)
        own = out.view(SIZE, -1)[axis.rank].copy_(every[axis.rank].view(-1))
        assert start_all_gather(own, out, axis).wait() is out
        assert torch.equal(out, torch.cat([part.view(-1) for part in every]))
        for source in range(SIZE):
            x = every[axis.rank].clone()
            assert broadcast(x, axis, source) is x and torch.equal(x, every[source])


def empty_tensors(topology: Topology) -> None:
    axis, empty = topology.tp, torch.empty(0, 4)
    assert all_reduce(empty.clone(), axis).shape == (0, 4)
    assert all_gather(empty, axis, 0).shape == (0, 4)
    assert all_gather(empty, axis, 1).shape == (0, 4 * SIZE)
    assert start_reduce_scatter(torch.empty(0), torch.empty(0), axis).wait().shape == (0,)
    assert broadcast(empty, axis).shape == (0, 4)


def objects(topology: Topology) -> None:
    axis = topology.tp
    mine = {"rank": axis.rank, "text": "x" * axis.rank}
    every = [{"rank": rank, "text": "x" * rank} for rank in range(SIZE)]
    assert all_gather_objects(mine, axis) == every
    assert gather_objects(mine, axis) == (every if axis.rank == 0 else [])
    assert broadcast_object(mine, axis, source=2) == every[2]
    barrier(axis)


def two_at_once(topology: Topology) -> None:
    """Waited for in another order than started."""
    axis = topology.tp
    first, second = torch.ones(1000), torch.full((1000,), 2.0)
    one, two = start_all_reduce(first, axis), start_all_reduce(second, axis)
    assert torch.equal(two.wait(), torch.full((1000,), 2.0 * SIZE))
    assert torch.equal(one.wait(), torch.full((1000,), 1.0 * SIZE))


def everything(topology: Topology) -> None:
    for check in (
        reduce_scatter_in_rank_order,
        reduce_scatter_of_a_narrow_wire,
        all_reduce_every_dtype,
        gather_every_dtype,
        empty_tensors,
        objects,
        two_at_once,
    ):
        check(topology)


def test_collectives_equal_their_one_process_meaning_in_every_dtype() -> None:
    run_on(Grid(tp=SIZE), everything)


def sources_of_a_line(topology: Topology) -> list[Any]:
    dp, tp = topology.dp, topology.tp
    return [broadcast_object(topology.rank, axis, 1) for axis in (dp, tp)]


@pytest.mark.report("deepspeedai/DeepSpeed#2999")
def test_a_source_is_a_rank_of_the_axis() -> None:
    assert run_on(Grid(dp=2, tp=2), sources_of_a_line) == [[2, 1], [3, 1], [2, 3], [3, 3]]


def test_on_an_axis_of_one_rank_the_input_comes_back() -> None:
    axis, x, out = Axis.single(), torch.arange(3.0), torch.empty(3)
    assert all_reduce(x, axis) is x and all_reduce(x, axis, op="max") is x
    assert all_gather(x, axis, 0) is x and broadcast(x, axis) is x
    assert start_all_reduce(x, axis).wait() is x
    for start in (start_reduce_scatter, start_all_gather):
        assert start(x, out.zero_(), axis).wait() is out and torch.equal(out, x)
        assert start(x, x, axis).wait() is x
    assert broadcast_object("a", axis) == "a"
    assert all_gather_objects("a", axis) == gather_objects("a", axis) == ["a"]
    barrier(axis)


def test_a_pending_result_is_made_once() -> None:
    made: list[Tensor] = []

    def make() -> Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    pending = Pending(make)
    assert pending.wait() is pending.wait() and len(made) == 1


def test_a_communication_that_is_over_holds_nothing_of_what_was_sent() -> None:
    sent, result = torch.zeros(3), torch.ones(3)
    alive = weakref.ref(sent)

    def pending(sent: Tensor) -> Pending:
        return Pending(lambda: result if len(sent) else sent)

    mine = pending(sent)
    del sent
    assert alive() is not None and not mine.is_over
    assert mine.wait() is result and alive() is None
    assert mine.is_over and mine.wait() is result
