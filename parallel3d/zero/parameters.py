"""Owned parameters in the host's memory: on the device they are only while they are gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..comm.collectives import Pending, start_all_gather
from ..comm.host import Lane, start_copy
from ..topology import Axis
from .flat import Flat
from .store import Room, Store


def keep_on_host(
    flats: Mapping[int, Sequence[Flat]], store: Store, host: Axis, device: torch.device
) -> None:
    """Move the shards of each unit's flats into a store, from which each gather takes its part.

    At ZeRO stage 3, after masters have moved, if they do. A gather copies ``n / d`` elements to
    the device, where the shard's place in the whole is, and an update that the device has made
    ``n / d`` to the host; both are counted on ``host``. What goes up does so beside what the
    device computes, as does the gather after it.
    """
    lane = Lane(device)
    for unit, mine in flats.items():
        store.reserve(
            unit, {str(at): Room(len(f.shard), f.shard.dtype) for at, f in enumerate(mine)}
        )
        for at, flat in enumerate(mine):
            flat.move_shard(
                store.tensor(unit, str(at)),
                bring=partial(_bring, flat, lane, host),
                away=partial(_away, flat, host, f"unit {unit}"),
            )


def _bring(flat: Flat, lane: Lane, host: Axis, tag: str) -> Pending:
    own = flat.data[slice(*flat.owned)]
    copied = lane.carry([start_copy(flat.shard, own, host, tag=tag)], lane.now())
    with lane.beside():
        gathered = start_all_gather(own, flat.data, flat.axis, tag=tag)

    def wait() -> Tensor:
        lane.follow(copied)  # of one rank nothing is gathered
        return gathered.wait()

    return Pending(wait)


def _away(flat: Flat, host: Axis, tag: str) -> None:
    start_copy(flat.master.to(flat.shard.dtype), flat.shard, host, tag=tag)()
