"""Copies between the device and the host's memory, counted as what an axis named host carries."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..topology import Axis
from .ledger import record


def host_axis(rank: int) -> Axis:
    """What the ledger hears the copies on: an axis of this rank alone."""
    return Axis("host", 1, 0, (rank,))


def start_copy(source: Tensor, target: Tensor, host: Axis, *, tag: str = "") -> Callable[[], None]:
    """Count a copy to or from the host, and return what makes it, on whatever thread calls that.

    Counted where the copy is decided, so that a step's bytes are its own even if copies are made
    beside it. On a device the copy is queued on the current stream: wait for that before the
    host's side is read or written. Raises ValueError for two dtypes or sizes: nothing but a copy.
    """
    if (source.dtype, source.shape) != (target.dtype, target.shape):
        raise ValueError(
            f"a copy of {source.dtype} {list(source.shape)} into {target.dtype} "
            f"{list(target.shape)}: both must be the same"
        )
    record(host, "offload", tag, "issue", source.numel() * source.element_size())
    return lambda: _copy(source, target)


def _copy(source: Tensor, target: Tensor) -> None:
    target.detach().copy_(source.detach(), non_blocking=True)
