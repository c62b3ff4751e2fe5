import torch

from parallel3d.log.memory import peak_memory_bytes, totals
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
    found = totals(Axis.single("world"), CPU, {"dp": 5})
    assert found[1:] == (0, 5, 0)
    assert found.peak_memory_bytes <= peak_memory_bytes(CPU)


def sent_by(topology: Topology) -> tuple[int, ...]:
    rank = topology.rank
    sent = {"pp": 2**40 + rank, "dp": 10 * rank, "tp": 1}
    found = totals(topology.world, topology.device, sent)
    assert found.peak_memory_bytes >= 2**20
    return tuple(found)


def test_totals_are_the_largest_peak_and_the_sums_on_every_rank() -> None:
    first, second = run_on(Grid(dp=2), sent_by)
    assert first == second
    assert first[1:] == (2**41 + 1, 10, 2)
