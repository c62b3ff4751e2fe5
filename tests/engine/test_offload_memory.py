"""Memory of runs whose optimizer lives elsewhere: constant, and on disk under a budget."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

from torch import Tensor, nn, ones

from parallel3d import Engine, Grid, Topology
from tests.engine.cases import blocks, same, train
from tests.engine.offload_cases import ADAMW, made, places
from tests.live import resident_bytes
from tests.world import run_on

MB = 2**20
BUDGET = 40 * MB
M_MMAP_THRESHOLD = -3


def status(key: str) -> int:
    """Of this process, bytes by their name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def on_disk(topology: Topology, folder: Path, units: int, width: int) -> tuple[Engine, Any]:
    place = {"optimizer": "disk", "path": str(folder / "scratch")}
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(units)])
    loss_fn = nn.MSELoss(reduction="sum")
    mine = Engine(model, topology, loss_fn=loss_fn, optimizer=ADAMW, offload=place)
    mine.parts.shards.zero_gradients()  # their memory is there from the start
    return mine, mine.parts.shards.host.store  # type: ignore[union-attr]


def steps_on_disk(topology: Topology, folder: Path) -> tuple[int, int]:
    """Bytes of state, 4.2 MB of each unit, and how far two steps raise the resident memory."""
    # What is freed goes back to the system at once, so that what is resident is in use.
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, MB)
    mine, store = on_disk(topology, folder, units=48, width=594)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, x = status("VmRSS"), ones(2, 594)
    for _ in range(2):
        mine.train_step(x, x)
    mine.parts.shards.settle()
    return store.nbytes, status("VmHWM") - before


def test_state_on_disk_needs_no_memory_of_its_size(tmp_path: Path) -> None:
    ((kept, peak),) = run_on(Grid(), steps_on_disk, folder=tmp_path)
    print(f"{kept / MB:.0f} MB of state, {peak / MB:.0f} MB resident")
    assert kept > 200 * 10**6 and peak < BUDGET


def save_and_load(topology: Topology, folder: Path) -> None:
    mine, store = on_disk(topology, folder, units=8, width=200)
    unit, x = store.nbytes // 8, ones(2, 200)
    for _ in range(2):
        mine.train_step(x, x)
    shards, seen = mine.parts.shards, [0]
    publish = shards.publish

    def look() -> None:
        seen.append(resident_bytes(str(folder / "scratch")))

    shards.publish = lambda: (look(), publish())[1]  # type: ignore[method-assign]
    mine.save(folder / "saved")
    look()
    mine.load(folder / "saved")  # looks when it is filled
    look()
    mine.state_dict_whole()
    look()
    assert len(seen) == 5 and max(seen) <= unit


def test_a_checkpoint_of_state_on_disk_leaves_none_of_it_resident(tmp_path: Path) -> None:
    run_on(Grid(), save_and_load, folder=tmp_path)


def kept() -> int:
    """Bytes of all tensors that any thread's objects hold."""
    gc.collect()
    held = {t.untyped_storage() for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def many_steps(topology: Topology, folder: Path) -> None:
    """200 steps under each offload as under none, and nothing grows from the second on."""
    options: dict[str, Any] = {"precision": "bf16", "lr_schedule": None, "num_microbatches": 1}
    plain = made(topology, blocks(topology, 2), **options)
    expected = train(plain, 200)
    for place in places(folder):
        mine = made(topology, blocks(topology, 2), offload=place, **options)
        told = train(mine, 2)
        mine.parts.shards.settle()
        before = kept()
        told += train(mine, range(2, 200))
        mine.parts.shards.settle()
        assert kept() == before
        assert told == expected
        assert same(mine.state_dict_whole(), plain.state_dict_whole())


def test_two_hundred_steps_take_constant_memory_and_give_the_right_numbers(tmp_path: Path) -> None:
    with Topology.init() as topology:
        many_steps(topology, tmp_path)
