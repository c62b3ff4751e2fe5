"""The processes of a benchmark, which are asked for one step after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any

LIMIT = 120.0  # seconds in which a step must answer


class StepError(RuntimeError):
    """A process could not do its step, or did not answer in time; the reason."""


@contextmanager
def started(mains: Sequence[tuple[Callable[..., None], tuple[Any, ...]]]) -> Iterator[list[Any]]:
    """Run each ``main(pipe, *arguments)`` in a process of its own; yields our ends of the pipes.

    None is sent to all at the end, and whoever then still runs is killed.
    """
    context, workers, pipes = get_context("spawn"), [], []
    for main, arguments in mains:
        ours, theirs = context.Pipe()
        workers.append(context.Process(target=main, args=(theirs, *arguments), daemon=True))
        workers[-1].start()
        pipes.append(ours)
    try:
        yield pipes
        for pipe in pipes:
            pipe.send(None)
        for worker in workers:
            worker.join(10)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def ask(pipes: Sequence[Any], question: Any) -> Iterator[tuple[int, Any]]:
    """Each process's number and answer, as they come; a text says why there is no better one.

    Raises StepError if for LIMIT seconds none comes.
    """
    for pipe in pipes:
        pipe.send(question)
    missing: dict[Any, int] = {pipe: number for number, pipe in enumerate(pipes)}
    while missing:
        ready: list[Any] = wait(list(missing), LIMIT)
        if not ready:
            raise StepError(f"no answer within {LIMIT:g} s")
        for pipe in ready:
            yield missing.pop(pipe), pipe.recv()
