"""Copies between the device and the host's memory, counted as what an axis named host carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..topology import Axis
from .ledger import record

Copy = Callable[[], None]


def host_axis(rank: int) -> Axis:
    """What the ledger hears the copies on: an axis of this rank alone."""
    return Axis("host", 1, 0, (rank,))


def start_copy(source: Tensor, target: Tensor, host: Axis, *, tag: str = "") -> Copy:
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


class Lane:
    """A stream of its own for copies; on the CPU they are made at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def now(self) -> Any:
        """What has been queued by this thread so far."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def beside(self) -> AbstractContextManager[Any]:
        """What is queued inside goes behind the copies, not behind what this thread computes."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def carry(self, copies: Sequence[Copy], after: Any) -> Any:
        """Queue copies after a moment; the moment at which they are made."""
        with self.beside():
            if self._stream is not None:
                self._stream.wait_event(after)
            for copy in copies:
                copy()
            return None if self._stream is None else self._stream.record_event()

    def stay(self, moment: Any) -> None:
        """Keep the host waiting for a moment."""
        if moment is not None:
            moment.synchronize()

    def follow(self, moment: Any) -> None:
        """Keep what this thread queues from now on waiting for a moment."""
        if moment is not None:
            torch.cuda.current_stream().wait_event(moment)


def _copy(source: Tensor, target: Tensor) -> None:
    target.detach().copy_(source.detach(), non_blocking=True)
