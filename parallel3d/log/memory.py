"""Peak memory of a rank, and the figures that a line of the log takes from all ranks."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..comm.collectives import all_gather
from ..topology import Axis


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes this process has held so far: CUDA's allocator, on CPU the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Totals(NamedTuple):
    """Over all ranks: the largest peak, the bytes sent on each axis of the grid."""

    peak_memory_bytes: int
    bytes_pp: int
    bytes_dp: int
    bytes_tp: int


def totals(world: Axis, device: torch.device, sent: Mapping[str, int]) -> Totals:
    """Join the figures of all ranks; collective, the same answer everywhere.

    Args:
        world: the axis over all ranks.
        device: whose peak memory is asked.
        sent: bytes that this rank sent, by name of axis (``pp``, ``dp``, ``tp``).

    Moves: 4 integers to every rank.
    """
    mine = [peak_memory_bytes(device), *(sent.get(axis, 0) for axis in ("pp", "dp", "tp"))]
    # On the host, so that no step waits for the device a second time.
    ranks = all_gather(torch.tensor([mine]), world, 0, tag="log")
    return Totals(int(ranks[:, 0].max()), *ranks[:, 1:].sum(0).tolist())
