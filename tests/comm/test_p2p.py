from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.comm.ledger import Ledger
from parallel3d.comm.p2p import Channel, Edge, open_channels
from parallel3d.topology import Grid, Topology
from tests.world import RankFailed, run_on

DOWN, UP = Edge(0, 1, "activations"), Edge(1, 0, "gradients")


def messages() -> dict[str, list[Tensor]]:
    half = torch.arange(5) / 3
    return {
        "bool": [torch.tensor([[True, False], [False, True]])],
        "complex": [torch.tensor([1 + 2j, -3j]), torch.tensor([2j], dtype=torch.complex128).conj()],
        "int64": [torch.tensor([2**62, -1]), torch.tensor(7)],
        "half": [half.bfloat16(), half.half()],
        "float8": [half.to(torch.float8_e4m3fn)],
        "empty": [torch.empty(0), torch.empty(2, 0, 3, dtype=torch.bool), torch.ones(1)],
        "nothing": [],
        "double": [torch.arange(6, dtype=torch.float64).view(2, 3) / 7],
    }


def receive(channel: Channel, like: list[Tensor]) -> list[Tensor]:
    buffers = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in like]
    for work in channel.post(buffers):
        work.wait()
    return buffers


def every_kind(topology: Topology) -> None:
    """The first stage's rank sends each kind, described; the other sends back what it got."""
    channels = open_channels(topology, [DOWN, UP], timeout=30)
    assert set(channels) == {DOWN, UP}
    for kind, tensors in messages().items():
        if topology.pp.rank == 0:
            channels[DOWN].send_description([(t.shape, t.dtype) for t in tensors])
            channels[DOWN].send(tensors)
            got = receive(channels[UP], tensors)
        else:
            described = channels[DOWN].receive_description()
            like = [torch.empty(shape, dtype=dtype) for shape, dtype in described]
            got = receive(channels[DOWN], like)
            channels[UP].send(got)
        assert len(got) == len(tensors)
        for one, other in zip(got, tensors, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), kind
            assert torch.equal(bits(one), bits(other)), kind
    for channel in channels.values():
        channel.flush()


def bits(x: Tensor) -> Tensor:
    return x.resolve_conj().contiguous().view(-1).view(torch.uint8)


@pytest.mark.report("pytorch/pytorch#183582")
def test_every_dtype_and_shape_arrives_bit_for_bit_with_its_description() -> None:
    run_on(Grid(pp=2), every_kind)


def in_order_and_both_ways(topology: Topology) -> None:
    """Receives posted ahead are filled in the sender's order, tp line by tp line."""
    channels = open_channels(topology, [DOWN, UP], timeout=30)
    first = topology.pp.rank == 0
    out, into = (DOWN, UP) if first else (UP, DOWN)
    ledger = Ledger()
    ledger.attach(topology.pp)
    buffers = [torch.zeros(n + 1) for n in range(8)]
    works = [channels[into].post([buffer]) for buffer in buffers]
    for n in range(8):
        channels[out].send([torch.full((n + 1,), 100.0 * topology.rank + n)])
    peer = channels[into].peer
    assert topology.grid.coordinates(peer)[1:] == topology.grid.coordinates(topology.rank)[1:]
    for n in reversed(range(8)):
        for work in works[n]:
            work.wait()
        assert torch.equal(buffers[n], torch.full((n + 1,), 100.0 * peer + n))
    channels[out].flush()
    assert ledger.bytes() == {"pp": 4 * 36}


def large_both_ways(topology: Topology) -> None:
    """8 MiB each way, sent before any receive is posted: buffering cannot hide a rendezvous."""
    channels = open_channels(topology, [DOWN, UP], timeout=30)
    first = topology.pp.rank == 0
    out, into = (DOWN, UP) if first else (UP, DOWN)
    for number in (1.0, 2.0):
        channels[out].send([torch.full((2**21,), number + topology.rank)])
        (got,) = receive(channels[into], [torch.empty(2**21)])
        assert got.unique().tolist() == [number + channels[into].peer]
    channels[out].flush()


def neighbours(topology: Topology) -> None:
    in_order_and_both_ways(topology)
    large_both_ways(topology)


@pytest.mark.report("NVIDIA/nccl#479")
@pytest.mark.report("pytorch/pytorch#172668")
def test_messages_arrive_in_order_and_both_directions_at_once_do_not_deadlock() -> None:
    run_on(Grid(pp=2, tp=2), neighbours)


def wrap_around(topology: Topology) -> list[list[float]]:
    """A ring of pipeline ranks, as more chunks than one need: a rank has only its own ends."""
    size, me = topology.pp.size, topology.pp.rank
    edges = [Edge(rank, (rank + 1) % size, "activations") for rank in range(size)]
    with patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        channels = open_channels(topology, edges[me:] + edges[:me] + edges, timeout=10)
    assert new_group.call_count == size, "however often and in whatever order they are named"
    into, out = edges[me - 1], edges[me]
    assert set(channels) == {into, out}
    channels[out].send([torch.tensor([float(me)])])
    got = receive(channels[into], [torch.empty(1)])
    channels[out].flush()
    return got[0].tolist()


def test_a_ring_of_channels_has_one_communicator_per_edge() -> None:
    assert run_on(Grid(pp=3), wrap_around) == [[2.0], [0.0], [1.0]]


def dies(topology: Topology) -> None:
    channels = open_channels(topology, [DOWN], timeout=30)
    if topology.pp.rank == 0:
        raise ValueError("planted")
    receive(channels[DOWN], [torch.empty(4)])


def test_a_receive_from_a_rank_that_has_ended_raises() -> None:
    with pytest.raises(RankFailed) as failure:
        run_on(Grid(pp=2), dies)
    first, second = failure.value.tracebacks.items()
    assert first[0] == 0 and "ValueError: planted" in first[1]
    assert second[0] == 1 and "work.wait()" in second[1]
