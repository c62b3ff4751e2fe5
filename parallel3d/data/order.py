"""Which document is held out, and which window comes when: pure functions of a seed.

Nothing is drawn from a generator and nothing is stored: a position is mapped to its place in a
permutation by arithmetic, so step 10**9 costs what step 0 costs, and a resumed run continues the
order that it left.
"""

from __future__ import annotations

import numpy as np

from ..rng import seed_of

ROUNDS = 8


def permute(index: np.ndarray, size: int, *key: str | int) -> np.ndarray:
    """Where each of ``index`` (values 0..size-1) goes in the permutation of 0..size-1 of ``key``.

    A Feistel network over the next even power of two, walked until it lands inside (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002, method 2). Same shape, int64.
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(seed_of(*key, number)) for number in range(ROUNDS)]
    place = np.asarray(index).astype(np.uint64)
    outside = np.ones(place.shape, dtype=bool)
    while outside.any():
        place[outside] = _feistel(place[outside], half, keys)
        outside = place >= size
    return place.astype(np.int64)


def _feistel(value: np.ndarray, half: int, keys: list[np.uint64]) -> np.ndarray:
    """A bijection of ``2 * half``-bit numbers: each round mixes one half into the other."""
    mask = np.uint64((1 << half) - 1)
    left, right = value >> np.uint64(half), value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << np.uint64(half)) | right


def _mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: every bit of the result depends on every bit of ``value``."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def split(num_documents: int, validation_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The documents of (train, validation), ascending: disjoint, and together all of them.

    Validation gets ``round(validation_share * num_documents)`` of them, which may be none, but
    never all: training keeps at least one. Raises ValueError for a share outside 0 <= share < 1.
    """
    if not 0 <= validation_share < 1:
        raise ValueError(
            f"data.validation_share = {validation_share} must be at least 0 and less than 1"
        )
    held_out = min(round(validation_share * num_documents), max(0, num_documents - 1))
    place = permute(np.arange(num_documents), num_documents, "split", seed)
    return np.flatnonzero(place >= held_out), np.flatnonzero(place < held_out)
