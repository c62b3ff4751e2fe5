from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel3d.topology import Grid, Topology
from tests.world import RankFailed, run_on


def coordinates_and_sum(topology: Topology, add: int) -> tuple[tuple[int, ...], int]:
    x = torch.tensor([topology.rank + add])
    if dist.is_initialized():
        dist.all_reduce(x)
    return (topology.pp.rank, topology.dp.rank, topology.tp.rank), int(x)


@pytest.mark.parametrize("grid", [Grid(), Grid(tp=2), Grid(pp=2, tp=2)], ids=str)
def test_each_rank_returns_its_value_in_rank_order(grid: Grid) -> None:
    results = run_on(grid, coordinates_and_sum, add=1)
    total = sum(range(1, grid.size + 1))
    assert results == [(grid.coordinates(rank), total) for rank in range(grid.size)]


def test_a_number_of_ranks_is_a_data_parallel_grid() -> None:
    assert [where for where, _ in run_on(2, coordinates_and_sum, add=0)] == [(0, 0, 0), (0, 1, 0)]


def tensor_back(topology: Topology, x: torch.Tensor) -> torch.Tensor:
    return x + topology.rank


def test_tensors_travel_both_ways_and_outlive_their_world() -> None:
    zero, one = run_on(2, tensor_back, x=torch.zeros(3))
    assert torch.equal(zero, torch.zeros(3)) and torch.equal(one, torch.ones(3))


def last_rank_raises_while_others_wait(topology: Topology) -> None:
    if topology.rank == topology.grid.size - 1:
        raise ValueError("planted")
    dist.barrier()


def test_a_failing_rank_is_named_with_its_coordinates_and_comes_first() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 3 \(pp 1, dp 0, tp 1\)") as failure:
        run_on(Grid(pp=2, tp=2), last_rank_raises_while_others_wait)
    first = next(iter(failure.value.tracebacks.items()))
    assert first[0] == 3 and "ValueError: planted" in first[1]
    assert time.monotonic() - start < 30, "a failure must not wait for the time-out"


def hang(topology: Topology, folder: str) -> None:
    Path(folder, str(topology.rank)).write_text(str(os.getpid()))
    time.sleep(600)


def test_a_hanging_world_ends_at_the_timeout_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="still running"):
        run_on(2, hang, timeout=2, folder=str(tmp_path))
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def die(topology: Topology) -> None:
    os._exit(topology.rank + 7)


def test_a_rank_that_dies_without_a_word_is_reported_by_its_exit_code() -> None:
    with pytest.raises(RankFailed, match="exit code 7"):
        run_on(1, die)


def warn(topology: Topology) -> None:
    warnings.warn("planted", stacklevel=1)


def test_warnings_are_errors_on_ranks_too() -> None:
    with pytest.raises(RankFailed, match="UserWarning: planted"):
        run_on(1, warn)
