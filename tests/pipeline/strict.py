"""A channel as strict as the ones that programs are proved for, between real processes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel3d.pipeline.border import Border, Link
from parallel3d.topology import Topology


class StrictLink:
    """Messages arrive in order, and a send ends only when its receive is reached.

    Real channels are kinder: they carry away what is sent, so that two ranks that both send first
    still meet. Here they wait for each other, until ``patience`` seconds are over.

    Args:
        channel: the real one.
        store: common to both ends.
        name: of the channel, the same at both ends and nowhere else.
        patience: seconds that a send waits for its receive.
    """

    def __init__(self, channel: Link, store: dist.Store, name: str, patience: float) -> None:
        self.channel, self.store, self.name = channel, store, name
        self.patience = timedelta(seconds=patience)
        self.count = 0

    def send(self, tensors: Sequence[Tensor]) -> None:
        self._await_receive()
        self.channel.send(tensors)
        self.channel.flush()

    def post(self, buffers: Sequence[Tensor]) -> list[Any]:
        self._tell_receive()
        return self.channel.post(buffers)

    def send_description(self, description: Any) -> None:
        self._await_receive()
        self.channel.send_description(description)

    def receive_description(self) -> Any:
        self._tell_receive()
        return self.channel.receive_description()

    def flush(self) -> None:
        self.channel.flush()

    def _key(self) -> str:
        self.count += 1
        return f"{self.name}/{self.count}"

    def _tell_receive(self) -> None:
        self.store.set(self._key(), "reached")

    def _await_receive(self) -> None:
        self.store.wait([self._key()], self.patience)


def make_strict(
    borders: dict[int, Border], topology: Topology, path: str, patience: float = 20.0
) -> None:
    """Put strict channels in front of a rank's own; ``path`` is a file of this world's."""
    store = dist.FileStore(path, topology.world.size)
    line = f"{topology.dp.rank},{topology.tp.rank}"
    for index, border in borders.items():
        for purpose in ("activations", "gradients"):
            link = StrictLink(
                getattr(border, purpose), store, f"{line}/{index}/{purpose}", patience
            )
            setattr(border, purpose, link)
