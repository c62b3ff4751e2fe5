"""One rank's error is every rank's error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..comm.collectives import all_gather_objects, broadcast_object
from ..topology import Axis

T = TypeVar("T")


def agree(world: Axis, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank and return its result, or raise on every rank if it raised on any.

    Every rank raises with the text of the lowest failing rank; that rank raises its own error. So
    no rank goes on alone into a collective that the others never reach.

    Moves   one small message per rank.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    told = None if error is None else (isinstance(error, ValueError), _text(error))
    for rank, failure in enumerate(all_gather_objects(told, world)):
        if failure is None:
            continue
        if rank == world.rank and error is not None:
            raise error
        is_value_error, text = failure
        kind = ValueError if is_value_error else RuntimeError
        raise kind(f"rank {world.ranks[rank]}: {text}") from error
    return result  # type: ignore[return-value]


def on_rank_0(world: Axis, work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 alone; every rank returns its result, or raises its error."""
    mine = agree(world, lambda: work() if world.rank == 0 else None)
    result: T = broadcast_object(mine, world)
    return result


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
