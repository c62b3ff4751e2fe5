"""Owned parameters in the host's memory: on the device they are only while they are gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ..comm.host import start_copy
from ..topology import Axis
from .flat import Flat
from .store import Room, Store


def keep_on_host(flats: Mapping[int, Sequence[Flat]], store: Store, host: Axis) -> None:
    """Move the shards of each unit's flats into a store, from which each gather takes its part.

    At ZeRO stage 3, after masters have moved, if they do. A gather copies ``n / d`` elements to
    the device, where the shard's place in the whole is, and an update that the device has made
    ``n / d`` to the host; both are counted on ``host``.
    """
    for unit, mine in flats.items():
        store.reserve(
            unit, {str(at): Room(len(f.shard), f.shard.dtype) for at, f in enumerate(mine)}
        )
        for at, flat in enumerate(mine):
            flat.move_shard(
                store.tensor(unit, str(at)),
                bring=partial(_bring, flat, host, f"unit {unit}"),
                away=partial(_away, flat, host, f"unit {unit}"),
            )


def _bring(flat: Flat, host: Axis, tag: str) -> None:
    start_copy(flat.shard, flat.data[slice(*flat.owned)], host, tag=tag)()


def _away(flat: Flat, host: Axis, tag: str) -> None:
    start_copy(flat.master.to(flat.shard.dtype), flat.shard, host, tag=tag)()
