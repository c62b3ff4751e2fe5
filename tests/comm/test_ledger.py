from __future__ import annotations

from itertools import pairwise

import torch

from parallel3d.comm.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from parallel3d.comm.ledger import Event, Ledger
from parallel3d.comm.p2p import Edge, open_channels
from parallel3d.topology import Axis, Grid, Topology
from tests.comm.network import bytes_on_the_wire, run_on_own_network
from tests.world import run_on

ELEMENTS = 3 * 2**18
# TCP, IP and Ethernet headers, acknowledgements, and gloo's own header on each message.
OVERHEAD, ROUNDS = 0.02, 2


def measure(topology: Topology) -> dict[str, tuple[int, int]]:
    """For each kind: bytes that the ledger says, and bytes on the wire meanwhile."""
    axis, rank, size = topology.world, topology.rank, topology.grid.size
    x, out = torch.ones(ELEMENTS), torch.empty(ELEMENTS)
    own = out.view(size, -1)[rank]
    edge = Edge(0, size - 1, "activations")
    line = open_channels(Topology.init(pp=size), [edge], timeout=60)

    def send() -> None:
        if rank == 0:
            line[edge].send([x])
            line[edge].flush()
        elif rank == size - 1:
            for work in line[edge].post([out]):
                work.wait()

    kinds = {
        "all_reduce": lambda: all_reduce(x, axis),
        "reduce_scatter": lambda: start_reduce_scatter(x, own, axis).wait(),
        "all_gather": lambda: start_all_gather(own, out, axis).wait(),
        "broadcast": lambda: broadcast(x, axis, size - 1),
        "send": send,
    }
    ledger = Ledger()
    ledger.attach(axis, *(channel.axis for channel in line.values()))
    found = {}
    for kind, run in kinds.items():
        run()  # gloo connects on first use
        barrier(axis)
        before = bytes_on_the_wire()
        barrier(axis)
        ledger.reset()
        for _ in range(ROUNDS):
            run()
        barrier(axis)
        found[kind] = sum(ledger.bytes().values()), bytes_on_the_wire() - before
        barrier(axis)
    return found


def test_the_ledger_agrees_with_the_interface_s_own_counters() -> None:
    """Exactly what is sent is counted: neither half of it nor a message twice."""
    size, whole = 3, ELEMENTS * 4 * ROUNDS
    ranks = run_on_own_network(Grid(tp=size), measure)
    bound = {
        "all_reduce": 2 * whole * (size - 1),
        "reduce_scatter": whole * (size - 1),
        "all_gather": whole * (size - 1),
        "broadcast": whole * (size - 1),
        "send": whole,
    }
    for kind, least in bound.items():
        counted = sum(rank[kind][0] for rank in ranks)
        wire = ranks[0][kind][1]
        assert counted == least, kind
        assert counted <= wire <= (1 + OVERHEAD) * counted, f"{kind}: {counted} of {wire}"


def accounts(topology: Topology) -> list[Event]:
    tp, ledger = topology.tp, Ledger()
    ledger.tracing = True
    ledger.attach(tp, topology.dp)
    x, y = torch.ones(6), torch.ones(4, dtype=torch.float64)
    first = start_all_reduce(x, tp, tag="first")
    all_reduce(y, tp, op="max", tag="second")
    first.wait()
    first.wait()
    all_gather(x, topology.dp, 0)
    assert ledger.bytes() == {"tp": 6 * 4 + 4 * 8, "dp": 6 * 4}
    trace = list(ledger.trace)
    ledger.tracing = False
    all_reduce(x, tp)
    assert ledger.trace == trace, "nothing is kept without tracing"
    ledger.reset()
    assert ledger.bytes() == {} and ledger.trace == []
    ledger.detach(tp, topology.dp)
    all_reduce(x, tp)
    assert ledger.bytes() == {}
    return trace


def test_a_trace_has_each_communication_once_in_the_order_of_the_program() -> None:
    for trace in run_on(Grid(dp=2, tp=2), accounts):
        assert [event[:4] for event in trace] == [
            ("tp", "all_reduce", "first", "issue"),
            ("tp", "all_reduce", "second", "issue"),
            ("tp", "all_reduce", "second", "wait"),
            ("tp", "all_reduce", "first", "wait"),
            ("dp", "all_gather", "", "issue"),
            ("dp", "all_gather", "", "wait"),
        ]
        assert [event.bytes for event in trace] == [24, 32, 0, 0, 24, 0]
        assert all(one.time <= other.time for one, other in pairwise(trace))


def test_an_axis_of_one_rank_sends_nothing() -> None:
    axis, ledger, x = Axis.single(), Ledger(), torch.ones(3)
    ledger.tracing = True
    ledger.attach(axis)
    assert all_reduce(x, axis) is x and all_gather(x, axis, 0) is x and broadcast(x, axis) is x
    start_reduce_scatter(x, torch.empty(3), axis).wait()
    start_all_gather(x, torch.empty(3), axis).wait()
    barrier(axis)
    assert ledger.bytes() == {} and ledger.trace == []
