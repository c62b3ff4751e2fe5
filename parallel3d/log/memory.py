"""Peak memory of a rank, and the figures that a line of the log takes from all ranks."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.collectives import all_gather
from ..topology import Axis, Grid
from .recorder import Window


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


class Stage(NamedTuple):
    """A stage of the pipeline in one step.

    ``bubble`` is the share of the pipeline's window, from the first start of a computation to the
    last end of one over all its ranks, in which the stage's rank computes nothing: the mean over
    the replicas of dp and tp. ``memory`` is the peak of the rank that holds it, in bytes, the
    largest of the replicas. The stages of one rank have the same.
    """

    bubble: float
    memory: int


def gather(world: Axis, device: torch.device, sent: Mapping[str, int], window: Window) -> Tensor:
    """The figures of each rank, for ``totals`` and ``stages``: [ranks, 7]. Collective.

    Args:
        world: the axis over all ranks.
        device: whose peak memory is asked.
        sent: bytes that this rank sent, by name of axis (``pp``, ``dp``, ``tp``).
        window: when this rank computed.

    Moves: 7 integers to every rank.
    """
    bytes_sent = (sent.get(axis, 0) for axis in ("pp", "dp", "tp"))
    mine = [peak_memory_bytes(device), *bytes_sent, *window]
    # On the host, so that no step waits for the device a second time.
    return all_gather(torch.tensor([mine]), world, 0, tag="log")


def totals(ranks: Tensor) -> Totals:
    """Join the figures of all ranks."""
    return Totals(int(ranks[:, 0].max()), *ranks[:, 1:4].sum(0).tolist())


def stages(ranks: Tensor, grid: Grid, rank_of_stage: Sequence[int]) -> list[Stage]:
    """Of every stage, from the figures of all ranks."""
    peak, busy, start, end = (
        ranks[:, column].view(grid.pp, grid.dp * grid.tp) for column in (0, 4, 5, 6)
    )
    length = (end.amax(0) - start.amin(0)).clamp(min=1)
    bubble = (1 - busy.double() / length).clamp(min=0).mean(1).tolist()
    return [Stage(bubble[rank], int(peak[rank].max())) for rank in rank_of_stage]
