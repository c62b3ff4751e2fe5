import pytest
import torch

from parallel3d.log.memory import Stage, gather, peak_memory_bytes, stages, totals
from parallel3d.log.recorder import Window
from parallel3d.topology import Axis, Grid, Topology
from tests.world import run_on

CPU = torch.device("cpu")


def test_peak_memory_is_in_bytes_and_never_falls() -> None:
    before = peak_memory_bytes(CPU)
    block = torch.ones(2**25)  # 128 MiB
    during = peak_memory_bytes(CPU)
    del block
    assert 2**26 < before <= during <= peak_memory_bytes(CPU) < 2**40


def test_one_process_totals_its_own() -> None:
    found = totals(gather(Axis.single("world"), CPU, {"dp": 5}, Window()))
    assert found[1:] == (0, 5, 0)
    assert found.peak_memory_bytes <= peak_memory_bytes(CPU)


def told(topology: Topology) -> tuple[tuple[int, ...], list[Stage]]:
    rank = topology.rank
    sent = {"pp": 2**40 + rank, "dp": 10 * rank, "tp": 1}
    window = Window(busy=2**61 + 4, start=2**62, end=2**62 + 2**61 + (8 if rank else 4))
    ranks = gather(topology.world, topology.device, sent, window)
    assert totals(ranks).peak_memory_bytes >= 2**20
    return tuple(totals(ranks)), stages(ranks, topology.grid, [0, 1])


def test_totals_are_the_largest_peak_and_the_sums_on_every_rank() -> None:
    first, second = run_on(Grid(pp=2), told)
    assert first == second
    assert first[0][1:] == (2**41 + 1, 10, 2)


def figures(*ranks: tuple[int, int, int, int]) -> torch.Tensor:
    """Of ranks with a peak in bytes, busy time, first start, last end."""
    return torch.tensor([[peak, 0, 0, 0, *window] for peak, *window in ranks])


def test_a_bubble_is_the_share_of_the_window_of_all_ranks_in_which_a_rank_computes_nothing() -> (
    None
):
    ranks = figures((7, 60, 100, 200), (9, 40, 120, 180))
    bubbles = [stage.bubble for stage in stages(ranks, Grid(pp=2), [0, 1])]
    assert bubbles == pytest.approx([1 - 60 / 100, 1 - 40 / 100], rel=1e-12)


def test_the_window_is_of_one_pipeline_and_the_bubble_the_mean_of_its_replicas() -> None:
    # dp = 2: ranks 0 and 2 are one pipeline, 1 and 3 the other, which runs at another time.
    ranks = figures((1, 5, 0, 10), (2, 4, 1000, 1020), (3, 8, 0, 10), (4, 20, 1000, 1020))
    first, second = stages(ranks, Grid(pp=2, dp=2), [0, 1])
    assert (first.bubble, second.bubble) == pytest.approx(((0.5 + 0.8) / 2, (0.2 + 0.0) / 2))
    assert (first.memory, second.memory) == (2, 4)


def test_the_stages_of_one_rank_share_its_figures() -> None:
    ranks = figures((1, 5, 0, 10), (2, 9, 0, 10))
    held = stages(ranks, Grid(pp=2), [0, 1, 1, 0])
    assert held[0] == held[3] != held[1] == held[2]


def test_a_step_without_a_computation_has_no_share_that_is_not_finite() -> None:
    assert stages(figures((1, 0, 0, 0)), Grid(), [0]) == [Stage(1.0, 1)]
