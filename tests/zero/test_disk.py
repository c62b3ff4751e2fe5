"""Stores: whose memory it is, what of it is resident, and what becomes of the files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel3d.zero.disk import DiskStore
from parallel3d.zero.store import Room, Store
from tests.live import resident_bytes

ROOMS = {"master": Room(1000, torch.float32), "narrow": Room(64, torch.bfloat16)}


@pytest.fixture(params=["cpu", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store() if request.param == "cpu" else DiskStore(tmp_path, 3)


def test_tensors_are_those_reserved_and_belong_to_the_store(store: Store) -> None:
    store.reserve(4, ROOMS)
    store.reserve(0, {"empty": Room(0, torch.float32)})
    master, narrow = (store.tensor(4, name) for name in ROOMS)
    assert master.shape == (1000,) and master.dtype == torch.float32
    assert narrow.shape == (64,) and narrow.dtype == torch.bfloat16
    master.fill_(1.0)
    narrow.fill_(2.0)
    assert store.tensor(4, "master").eq(1).all() and store.tensor(4, "narrow").eq(2).all()
    assert store.owns(master) and store.owns(narrow[3:]) and not store.owns(torch.ones(1000))
    assert store.has(4, "narrow") and not store.has(4, "other") and not store.has(7, "master")
    assert store.nbytes == 4096 + 4096
    with pytest.raises(KeyError):
        store.tensor(4, "other")


def test_pinned_memory_is_as_large_as_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is let go with its store. Not run on a device: what would be asked of one."""
    pinned: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        pinned[address] = size
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", int)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    store = Store(pinned=True)
    store.reserve(0, ROOMS)
    store.reserve(1, {"empty": Room(0, torch.float32)})
    assert pinned == {store.tensor(0, "master").data_ptr(): store.nbytes}
    del store
    assert pinned == {}


def test_values_survive_being_let_go(store: Store) -> None:
    for unit in range(3):
        store.reserve(unit, ROOMS)
        store.tensor(unit, "master").zero_()
    for turn in range(3):
        for unit in range(3):
            store.fetch(unit)
            store.tensor(unit, "master").add_(unit + 1)
            if turn % 2:
                store.release(unit)
            else:
                store.let_go(unit)
    store.settle()
    for unit in range(3):
        assert store.tensor(unit, "master").eq(3 * (unit + 1)).all()


def test_memory_of_few_units_is_resident(tmp_path: Path) -> None:
    units, size = 20, 2**18  # 20 MB in files of 1 MB
    store = DiskStore(tmp_path, 0)
    for unit in range(units):
        store.reserve(unit, {"master": Room(size, torch.float32)})
    folder = str(store.folder)
    assert resident_bytes(folder) == 0
    for _ in range(2):
        for unit in range(units):
            store.fetch((unit + 1) % units)
            store.tensor(unit, "master").add_(1)
            store.release(unit)
            assert resident_bytes(folder) <= 2 * 4 * size
    store.settle()
    assert resident_bytes(folder) == 0
    assert all(store.tensor(unit, "master").eq(2).all() for unit in range(units))
    assert resident_bytes(folder) == units * 4 * size  # the measure sees what is resident


def test_files_are_one_a_unit_in_a_folder_of_the_rank_and_go_with_the_store(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "deep" / "scratch", 3)
    for unit in (2, 5):
        store.reserve(unit, ROOMS)
    (folder,) = (tmp_path / "deep" / "scratch").iterdir()
    assert folder == store.folder and folder.name.startswith("rank-00003-")
    assert sorted(f.name for f in folder.iterdir()) == ["lock", "unit-00002.bin", "unit-00005.bin"]
    assert (folder / "unit-00002.bin").stat().st_blocks * 512 >= 8192  # no hole to fall into
    del store
    assert not folder.exists()


CHILD = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
import torch
from parallel3d.zero.disk import DiskStore
from parallel3d.zero.store import Room
store = DiskStore(Path(sys.argv[1]), int(sys.argv[2]))
store.reserve(0, {"master": Room(64, torch.float32)})
print(store.folder.name, flush=True)
if len(sys.argv) > 3:
    time.sleep(60)
"""


def child(path: Path, rank: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(path), str(rank), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def named(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_killed_process_leaves_files_that_the_next_removes_and_a_living_one_keeps_its_own(
    tmp_path: Path,
) -> None:
    living, dead = child(tmp_path, 0, "wait"), child(tmp_path, 1, "wait")
    kept, stale = named(living), named(dead)
    try:
        os.kill(dead.pid, signal.SIGKILL)
        dead.communicate()
        assert {f.name for f in tmp_path.iterdir()} == {kept, stale}
        store = DiskStore(tmp_path, 1)
        assert {f.name for f in tmp_path.iterdir()} == {kept, store.folder.name}
    finally:
        living.kill()
        living.communicate()


def test_a_process_killed_while_it_makes_its_folder_leaves_none_either(tmp_path: Path) -> None:
    (tmp_path / "rank-00001-0123abcd").mkdir()
    store = DiskStore(tmp_path, 1)
    assert list(tmp_path.iterdir()) == [store.folder]


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "rank-0-results"
    theirs.mkdir()
    (theirs / "lock").touch()
    store = DiskStore(tmp_path, 0)
    assert set(tmp_path.iterdir()) == {theirs, store.folder}


def test_a_clean_end_leaves_nothing(tmp_path: Path) -> None:
    process = child(tmp_path, 0)
    process.communicate()
    assert process.returncode == 0 and list(tmp_path.iterdir()) == []


def test_a_path_that_is_no_folder_is_named_with_the_way_out(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        message = rf"offload.path = {path} cannot be used: .* or offload.optimizer=cpu"
        with pytest.raises(OSError, match=message):
            DiskStore(path, 0)


def test_a_disk_without_space_is_named_with_what_is_left(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 0)
    message = r"No space left on device: .*unit-00000.bin needs .* set offload\.path to a larger"
    with pytest.raises(OSError, match=message):
        store.reserve(0, {"master": Room(2**40, torch.float32)})
