"""Messages between neighbouring pipeline ranks: one communicator per direction and purpose.

[Note: communicators] A communicator runs its operations in order, so one that carried both
directions would make neighbours wait for each other as soon as a receive is posted early. There is
one per (sending rank, receiving rank, activations or gradients), made by every rank of the world
in one order and warmed by one message; then the order on each is the program's, which
``pipeline.simulate`` has checked at both ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..topology import MARGIN, Axis, Topology
from .ledger import record


class Edge(NamedTuple):
    """A direction between two pipeline ranks, for ``activations`` or ``gradients``."""

    sender: int
    receiver: int
    purpose: str


class Channel:
    """One end of an edge. What is sent arrives in order.

    ``axis`` is the pipeline axis (for the ledger), ``peer`` the global rank of the other end.
    """

    def __init__(
        self, axis: Axis, group: dist.ProcessGroup | None, peer: int, purpose: str
    ) -> None:
        self.axis, self.group, self.peer, self.purpose = axis, group, peer, purpose
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Hand over contiguous tensors; each is kept until it has gone.

        gloo tells that a message has gone only to who waits, so there the message before is waited
        for: this ends, as a program does even where every send waits for its receive. A device's
        stream is not made to wait.
        """
        before, self._sent = self._sent, []
        for tensor in tensors:
            data = _as_real(tensor)
            record(self.axis, "send", self.purpose, "issue", data.numel() * data.element_size())
            if data.numel():
                self._sent.append((dist.isend(data, self.peer, group=self.group), data))
        for work, data in before:
            if data.device.type == "cpu":
                work.wait()
            elif not work.is_completed():
                self._sent.append((work, data))

    def post(self, buffers: Sequence[Tensor]) -> list[Any]:
        """Post the receives of one message; ``wait`` for each before reading its buffer."""
        works = []
        for buffer in buffers:
            record(self.axis, "receive", self.purpose, "issue")
            if buffer.numel():
                works.append(dist.irecv(_as_real(buffer), self.peer, group=self.group))
        return works

    def send_description(self, description: Any) -> None:
        """Tell the receiver, by the host, what the next message is made of."""
        dist.send_object_list([description], self.peer, self.group, torch.device("cpu"))

    def receive_description(self) -> Any:
        """Wait for what ``send_description`` tells."""
        box = [None]
        dist.recv_object_list(box, self.peer, self.group, torch.device("cpu"))
        return box[0]

    def close(self) -> None:
        """Forget the communicator."""
        self._sent.clear()
        self.group = None

    def flush(self) -> None:
        """Wait until everything sent has gone."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()


def open_channels(topology: Topology, edges: Iterable[Edge], timeout: float) -> dict[Edge, Channel]:
    """The channels of this rank, for edges between pipeline ranks. Collective over the world.

    Every rank must give the same edges. Each becomes one communicator in every pipeline line (the
    ranks that share dp and tp coordinates), once for all that use the topology; a rank keeps the
    ends it is.
    """
    grid, wanted = topology.grid, sorted(set(edges))
    new = [edge for edge in wanted if edge not in topology.channels]
    for edge in new:
        topology.channels[edge] = None
        for dp in range(grid.dp):
            for tp in range(grid.tp):
                ends = [grid.rank(edge.sender, dp, tp), grid.rank(edge.receiver, dp, tp)]
                group = dist.new_group(sorted(ends), timeout=timedelta(seconds=timeout + MARGIN))
                if topology.rank in ends:
                    peer = ends[0] if topology.rank == ends[1] else ends[1]
                    topology.channels[edge] = Channel(topology.pp, group, peer, edge.purpose)
    ends_of = {edge: channel for edge, channel in topology.channels.items() if channel is not None}
    for edge in filter(ends_of.__contains__, new):
        channel = ends_of[edge]
        one = torch.zeros(1, device=topology.device)
        if topology.pp.rank == edge.sender:
            dist.send(one, channel.peer, group=channel.group)
        else:
            dist.recv(one, channel.peer, group=channel.group)
    return {edge: ends_of[edge] for edge in wanted if edge in ends_of}


def _as_real(tensor: Tensor) -> Tensor:
    """Complex numbers travel as pairs, booleans as bytes: not every backend knows them."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
