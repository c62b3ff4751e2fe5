"""The watch of one rank, as the main thread knows it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from ..pipeline.runtime import Interpreter
from ..topology import Topology
from .board import Board
from .follow import Follower
from .guard import Guard
from .notes import CLOSING, OUTSIDE, Doing, Notes
from .report import name

T = TypeVar("T")
P = ParamSpec("P")
# What gloo and NCCL sign their errors with: they have no type of their own everywhere.
LOST = re.compile(r"gloo/transport|[Gg]loo connect|NCCL")


def watch_over(topology: Topology, timeout: float) -> Watch:
    """The watch of this rank, started where it is the first on the topology. Collective.

    ``timeout`` in seconds holds from now on.
    """
    if topology.watch is None:
        topology.watch = Watch(topology, timeout)
    watch: Watch = topology.watch
    watch.set_timeout(timeout)
    return watch


def watched(
    phase: str,
) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Makes a method, of an object with a ``watch``, a phase."""

    def mark(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @wraps(method)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            with self.watch.during(phase):
                return method(self, *args, **kwargs)

        return call

    return mark


class Watch:
    """Notes what the main thread does; where there are several ranks a ``Guard`` reads it."""

    def __init__(self, topology: Topology, timeout: float) -> None:
        axes = (topology.world, topology.pp, topology.dp, topology.tp)
        self.notes = Notes({(axis.name, axis.ranks): axis.name for axis in axes})
        self._topology, self._axes, self._guard = topology, axes, None
        if topology.store is None or topology.grid.size == 1:
            return
        for axis in axes:
            axis.observers.append(self.notes.hears)
        board = Board(topology.store, topology.rank, topology.grid.size)
        self._guard = Guard(self.notes, board, topology.grid, timeout, self._host())

    def set_timeout(self, timeout: float) -> None:
        """In seconds, from now on."""
        if self._guard is not None:
            self._guard.timeout = timeout

    def follow(self, interpreter: Interpreter, rank_of_stage: Sequence[int]) -> None:
        """Note every action of a pipeline rank."""
        interpreter.observers.append(Follower(self.notes, self._topology, rank_of_stage))

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase of the program. An error that leaves it is told to all ranks.

        If it is a lost connection, a note of it says which rank is gone.
        """
        before = self.notes.enters(phase)
        try:
            yield
        except Exception as error:
            self._explain(error)
            raise
        self.notes.enters(before)

    def each(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """The items; the time to make one is a phase."""
        iterator, end = iter(items), object()
        while True:
            with self.during(phase):
                item = next(iterator, end)
            if item is end:
                return
            yield item  # type: ignore[misc]

    def enters(self, phase: str) -> None:
        """The next part of a phase."""
        self.notes.enters(phase)

    def awaits_device(self) -> None:
        """From here the host may stand still until the device has done what it was given."""
        self.notes.does(Doing("awaits"))

    def close(self) -> None:
        """From here all that is left is to wait for the others."""
        self.notes.enters(CLOSING)

    def stop(self) -> None:
        """End the thread, and listen no more."""
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
            for axis in self._axes:
                axis.observers.remove(self.notes.hears)
        self.notes.enters(OUTSIDE)

    def _explain(self, error: Exception) -> None:
        if self._guard is None or self.notes.activity.failure is not None:
            return
        lost = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and LOST.search(str(error)) is not None
        )
        self.notes.fails(error, lost)
        if not lost:
            self._guard.tell_now()
        elif report := self._guard.ask():
            error.add_note(report)

    def _host(self) -> str:
        """Who keeps the store."""
        store = self._topology.store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.FileStore):
            return f"the file {store.path}"  # type: ignore[attr-defined]
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return "the launcher"
        return name(self._topology.grid, 0)
