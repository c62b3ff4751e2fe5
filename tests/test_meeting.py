from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from parallel3d.meeting import meet


def all_meet(store: dist.Store, world_size: int, late: int | None = None) -> list[dist.Store]:
    def one(rank: int) -> dist.Store:
        time.sleep(0.1 if rank == late else 0)
        return meet(store, rank, world_size, timeout=5)

    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(one, range(world_size)))


@pytest.mark.parametrize("late", [None, 0, 2])
def test_all_share_one_part_whoever_comes_last(late: int | None) -> None:
    parts = all_meet(dist.HashStore(), 3, late)
    parts[2].set("key", "value")
    assert [part.get("key") for part in parts] == [b"value"] * 3


def test_nothing_of_an_earlier_start_is_seen_also_one_that_died_on_the_way() -> None:
    store = dist.HashStore()
    for part in all_meet(store, 3):
        part.set("address", "old")
    with pytest.raises(RuntimeError, match=r"of 3 processes rank 1, 2 did not start within 0\.1 s"):
        meet(store, 0, 3, timeout=0.1)
    with pytest.raises(RuntimeError, match=r"rank 2 waited 0\.1 s for rank 0"):
        meet(store, 2, 3, timeout=0.1)
    assert not any(part.check(["address"]) for part in all_meet(store, 3, late=2))


def test_one_process_meets_itself() -> None:
    assert meet(dist.HashStore(), 0, 1, timeout=1).check(["address"]) is False
