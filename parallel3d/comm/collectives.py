"""Collectives by axis. On an axis of size 1 nothing is sent and the input comes back.

Bytes are what one rank sends. With ``n`` elements and ``d`` ranks an all-reduce sends
``2 n (d - 1) / d`` elements, a reduce-scatter or all-gather ``n (d - 1) / d`` with ``n`` the whole;
a broadcast's ``n (d - 1)`` are counted at its source, whoever passes them on. These are also the
lower bounds without reduction inside the network. Objects go by the host and are not counted. In a
forward that is repeated, what an axis's memo knows is not sent again (see ``memo.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..topology import Axis
from .ledger import record
from .memo import knows

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Pending:
    """A communication under way: ``wait()`` gives its result, and may be called once or more."""

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self._wait: Callable[[], Tensor] | None = wait
        self._result: Tensor | None = None

    @classmethod
    def done(cls, result: Tensor) -> Pending:
        """Nothing to wait for."""
        pending = cls(lambda: result)
        pending.wait()
        return pending

    @property
    def is_over(self) -> bool:
        """Whether it has been waited for: unlike arrival, the same on ranks that do the same."""
        return self._wait is None

    def wait(self) -> Tensor:
        """Block (the CPU on gloo, the current stream on NCCL) until the result is there."""
        if self._wait is not None:
            self._result = self._wait()
            self._wait = None  # it holds what was sent
        assert self._result is not None
        return self._result


def start_all_reduce(x: Tensor, axis: Axis, *, op: str = "sum", tag: str = "") -> Pending:
    """All-reduce ``x`` in place, in the background."""
    if axis.size == 1 or knows(axis, x):
        return Pending.done(x)
    sent = 2 * x.numel() * x.element_size() * (axis.size - 1) // axis.size
    record(axis, "all_reduce", tag, "issue", sent)
    work = dist.all_reduce(x, op=_OPS[op], group=axis.group, async_op=True)
    return _pending(work, axis, "all_reduce", tag, x)


def all_reduce(x: Tensor, axis: Axis, *, op: str = "sum", tag: str = "") -> Tensor:
    """All-reduce ``x`` in place and return it."""
    return start_all_reduce(x, axis, op=op, tag=tag).wait()


def start_reduce_scatter(
    x: Tensor, out: Tensor, axis: Axis, *, wire: torch.dtype | None = None, tag: str = ""
) -> Pending:
    """Sum flat ``x`` [n] over the axis; this rank's slice [n / d] lands in ``out``.

    With ``wire``, a narrower dtype, every rank's ``x`` travels rounded to it, its own part too.

    gloo's own reduce-scatter is an all-reduce in disguise and sends twice the bytes, so there it
    is an all-to-all and a sum in rank order, which also depends on no algorithm's choice. The sum
    is in the dtype of ``out``; NCCL sums in ``wire``.
    """
    if axis.size == 1:
        return Pending.done(out if out.data_ptr() == x.data_ptr() else out.copy_(x))
    if wire is not None and wire.itemsize < x.element_size():
        x = x.to(wire)
    sent = x.numel() * x.element_size() * (axis.size - 1) // axis.size
    record(axis, "reduce_scatter", tag, "issue", sent)
    if not _is_gloo(axis, x):
        landing = out if out.dtype == x.dtype else torch.empty_like(out, dtype=x.dtype)
        work = dist.reduce_scatter_single(landing, x, group=axis.group, async_op=True)
        pending = _pending(work, axis, "reduce_scatter", tag, landing)
        if landing is out:
            return pending
        return Pending(lambda: out.copy_(pending.wait()))
    parts = torch.empty_like(x)
    work = dist.all_to_all_single(parts, x, group=axis.group, async_op=True)

    def wait() -> Tensor:
        record(axis, "reduce_scatter", tag, "block")
        work.wait()
        record(axis, "reduce_scatter", tag, "wait")
        first, second, *rest = parts.chunk(axis.size)
        torch.add(first.to(out.dtype), second, out=out)
        for part in rest:
            out.add_(part)
        return out

    return Pending(wait)


def start_all_gather(owned: Tensor, out: Tensor, axis: Axis, *, tag: str = "") -> Pending:
    """Gather flat ``owned`` [n / d] of every rank into ``out`` [n]; may be its own slice."""
    if axis.size == 1:
        return Pending.done(out if out.data_ptr() == owned.data_ptr() else out.copy_(owned))
    if knows(axis, out):
        return Pending.done(out)
    record(axis, "all_gather", tag, "issue", owned.numel() * owned.element_size() * (axis.size - 1))
    work = dist.all_gather_single(out, owned, group=axis.group, async_op=True)
    return _pending(work, axis, "all_gather", tag, out)


def all_gather(x: Tensor, axis: Axis, dim: int, *, tag: str = "") -> Tensor:
    """Every rank's ``x``, of one shape, concatenated along ``dim``."""
    if axis.size == 1:
        return x
    out = x.new_empty((axis.size, *x.shape))
    start_all_gather(x.contiguous().view(-1), out.view(-1), axis, tag=tag).wait()
    return torch.cat(out.unbind(0), dim)


def all_to_all(
    x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis, *, tag: str = ""
) -> Tensor:
    """Parts of flat ``x`` to each rank of the axis, and theirs for this one, in rank order.

    Args:
        x: [sum(sent)], one part after another.
        sent: elements for each rank.
        received: elements from each rank; together the length of the result.
    """
    if axis.size == 1:
        return x
    others = x.numel() - sent[axis.rank]
    record(axis, "all_to_all", tag, "issue", others * x.element_size())
    out = x.new_empty(sum(received))
    work = dist.all_to_all_single(
        out, x, list(received), list(sent), group=axis.group, async_op=True
    )
    return _pending(work, axis, "all_to_all", tag, out).wait()


def sum_in_order(x: Tensor, axis: Axis, *, tag: str = "") -> Tensor:
    """Every rank's flat ``x`` [n] added up in rank order, so that ``n`` changes no bit."""
    if axis.size == 1:
        return x
    padded = x.new_zeros(-(-x.numel() // axis.size) * axis.size)
    padded[: x.numel()] = x
    own = padded.new_empty(padded.numel() // axis.size)
    start_reduce_scatter(padded, own, axis, tag=tag).wait()
    start_all_gather(own, padded, axis, tag=tag).wait()
    return padded[: x.numel()]


def bytes_in_order(count: int, dtype: torch.dtype, axis: Axis) -> int:
    """That ``sum_in_order`` of so many elements sends: they are padded to a multiple of ``d``."""
    return 2 * -(-count // axis.size) * dtype.itemsize * (axis.size - 1)


def start_broadcast(x: Tensor, axis: Axis, source: int = 0, *, tag: str = "") -> Pending:
    """Fill ``x`` on every rank with that of ``source``, a rank of the axis; in the background."""
    if axis.size == 1:
        return Pending.done(x)
    sent = x.numel() * x.element_size() * (axis.size - 1) if axis.rank == source else 0
    record(axis, "broadcast", tag, "issue", sent)
    work = dist.broadcast(x, axis.ranks[source], group=axis.group, async_op=True)
    return _pending(work, axis, "broadcast", tag, x)


def broadcast(x: Tensor, axis: Axis, source: int = 0, *, tag: str = "") -> Tensor:
    """Fill ``x`` on every rank with that of ``source``, a rank of the axis; in place."""
    return start_broadcast(x, axis, source, tag=tag).wait()


def broadcast_object(obj: Any, axis: Axis, source: int = 0) -> Any:
    """A small Python object of ``source``, a rank of the axis; by the host."""
    if axis.size == 1:
        return obj
    box, host = [obj], torch.device("cpu")
    with _by_the_host(axis, "broadcast_object"):
        dist.broadcast_object_list(box, axis.ranks[source], group=axis.group, device=host)
    return box[0]


def all_gather_objects(obj: Any, axis: Axis) -> list[Any]:
    """One small Python object of each rank, in rank order; by the host."""
    gathered = [obj] * axis.size
    if axis.size > 1:
        with _by_the_host(axis, "all_gather_objects"):
            dist.all_gather_object(gathered, obj, group=axis.group)
    return gathered


def gather_objects(obj: Any, axis: Axis) -> list[Any]:
    """One Python object of each rank, in rank order, on rank 0 of the axis; elsewhere []."""
    if axis.size == 1:
        return [obj]
    gathered = [None] * axis.size if axis.rank == 0 else None
    with _by_the_host(axis, "gather_objects"):
        dist.gather_object(obj, gathered, axis.ranks[0], group=axis.group)
    return gathered or []


def barrier(axis: Axis) -> None:
    """Wait until every rank of the axis is here."""
    if axis.size > 1:
        with _by_the_host(axis, "barrier"):
            dist.all_reduce(torch.zeros(1), group=axis.group)


@contextmanager
def _by_the_host(axis: Axis, kind: str) -> Iterator[None]:
    """What blocks from its beginning to its end, and is not counted."""
    record(axis, kind, "", "issue")
    record(axis, kind, "", "block")
    yield
    record(axis, kind, "", "wait")


def writes_unwaited(axis: Axis, x: Tensor) -> bool:
    """Whether a sum of ``x`` is written to where it lands, waited for or not.

    NCCL's is, on a stream of its own, and its wait holds up the current stream, not the host.
    """
    return axis.size > 1 and not _is_gloo(axis, x)


def _is_gloo(axis: Axis, x: Tensor) -> bool:
    assert axis.group is not None
    return axis.group._get_backend(x.device).name() == "gloo"


def _pending(work: Any, axis: Axis, kind: str, tag: str, result: Tensor) -> Pending:
    def wait() -> Tensor:
        record(axis, kind, tag, "block")
        work.wait()
        record(axis, kind, tag, "wait")
        return result

    return Pending(wait)
