"""Batches of coming steps, made ahead of time by worker processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..rng import seed_of, seeded


class Prefetch:
    """Iterates over ``fetch(step, slots)`` for the steps ``start`` to ``stop - 1``.

    With ``workers`` > 0 as many processes make batches ahead; the batches are the same, also where
    ``fetch`` draws random numbers of Python's, NumPy's or torch's default generators: those are
    seeded by (seed, step, slots) for each call. The generators of the calling process are left
    as they were.

    Args:
        fetch: such as ``TokenFiles.train``; any function of a step and slots.
        slots: this rank's slots of every step.
        start: first step, where a resumed run continues.
        stop: the step after the last.
        seed: of random numbers drawn inside ``fetch``.
        workers: processes; 0 makes each batch when it is asked for.
    """

    def __init__(
        self,
        fetch: Callable[[int, Sequence[int]], Any],
        slots: Sequence[int],
        start: int,
        stop: int,
        *,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        if workers < 0:
            raise ValueError(f"data.workers = {workers} must be 0 or a number of processes")
        self._steps = range(start, stop)
        self._batches = _Batches(fetch, tuple(slots), seed)
        self._workers = workers

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Any]:
        if self._workers == 0:
            return map(self._batches.__getitem__, self._steps)
        # A generator of its own: the loader takes the base seed of its workers from it, and would
        # otherwise take it from the default one, on those ranks only that have workers.
        return iter(
            DataLoader(
                self._batches,
                batch_size=None,
                sampler=self._steps,
                num_workers=self._workers,
                collate_fn=_unchanged,  # the loader's own would turn tuples into lists
                generator=torch.Generator(),
            )
        )


def _unchanged(batch: Any) -> Any:
    return batch


class _Batches(Dataset[Any]):
    def __init__(
        self, fetch: Callable[[int, Sequence[int]], Any], slots: tuple[int, ...], seed: int
    ) -> None:
        self._fetch = fetch
        self._slots = slots
        self._seed = seed

    def __getitem__(self, step: int) -> Any:
        with _isolated(seed_of("data", self._seed, step, *self._slots)):
            return self._fetch(step, self._slots)


@contextmanager
def _isolated(seed: int) -> Iterator[None]:
    """Run with the default generators at ``seed``; afterwards they are where they were."""
    python, numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    try:
        with seeded(seed):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
