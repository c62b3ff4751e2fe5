from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from parallel3d.checkpoint import (
    LOCAL,
    Files,
    Fragment,
    damage,
    latest_valid,
    list_checkpoints,
    load,
    prune,
    read_manifest,
    save,
    step_folder,
)
from parallel3d.placement import Rectangle
from parallel3d.topology import Axis, Topology
from tests.world import RankFailed, run_on

WORLD = Axis.single("world")


def save_value(folder: Path, step: int, value: float, world: Axis, files: Files) -> None:
    """A checkpoint of several blocks, of which each rank of ``world`` writes an equal part."""
    share = Rectangle(world.rank * 8, 0, 8, 1)
    fragment = Fragment("weight/a", (8 * world.size,), [share], torch.full((8,), value))
    save(step_folder(folder, step), [fragment], {"value": value}, world, files, block_bytes=16)


def newest_value(folder: Path) -> float:
    """The value in the newest checkpoint, after a check that data and meta are of one save."""
    checkpoint = latest_valid(folder, WORLD)
    assert checkpoint is not None
    data = torch.zeros(read_manifest(checkpoint, LOCAL).tensors["weight/a"].shape)
    meta = load(checkpoint, [Fragment.whole("weight/a", data)], WORLD)
    assert torch.equal(data, torch.full_like(data, meta["value"]))
    return float(meta["value"])


def is_sound(checkpoint: Path) -> bool:
    return damage(checkpoint, read_manifest(checkpoint, LOCAL), WORLD, LOCAL) is None


class Mortal(Files):
    """Dies at its ``at``-th change of the disk, in the middle of it where it has a middle."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.done = 0

    def live(self, file: BinaryIO | None = None, half: memoryview | None = None) -> None:
        self.done += 1
        if self.done == self.at:
            if file is not None and half is not None:
                file.write(half)
            os._exit(9)

    def make_folder(self, folder: Path) -> None:
        self.live()
        super().make_folder(folder)

    @contextmanager
    def create(self, path: Path) -> Iterator[BinaryIO]:
        self.live()
        with super().create(path) as file:
            yield file

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self.live(file, data[: len(data) // 2])
        super().write(file, data)

    def fsync(self, file: BinaryIO) -> None:
        self.live()

    def fsync_folder(self, folder: Path) -> None:
        self.live()

    def rename(self, source: Path, target: Path) -> None:
        self.live()
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.live()
        super().remove(path)


def killed_everywhere(topology: Topology, folder: str) -> list[float]:
    """For each change of the disk, the newest value after a death there; then a life without."""
    values: list[float] = []
    for at in range(1, 200):
        run = Path(folder, str(at))
        save_value(run, 10, 10.0, WORLD, Files())
        if (child := os.fork()) == 0:
            files = Mortal(at)
            save_value(run, 20, 20.0, WORLD, files)
            save_value(run, 20, 21.0, WORLD, files)
            prune(run, 1, WORLD, files=files)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        values.append(newest_value(run))
        assert all(is_sound(checkpoint) for checkpoint in list_checkpoints(run))
        save_value(run, 30, 30.0, WORLD, Files())
        prune(run, 2, WORLD)
        assert newest_value(run) == 30.0
        names = {path.name for path in run.iterdir()}
        assert names <= {"step-00000010", "step-00000020", "step-00000030"}, names
        if os.waitstatus_to_exitcode(status) == 0:
            return values
    raise AssertionError("it never lived to the end")


def test_a_checkpoint_loads_wherever_the_process_is_killed(tmp_path: Path) -> None:
    (values,) = run_on(1, killed_everywhere, folder=str(tmp_path))
    assert len(values) > 30, "too few places to die at"
    assert values == sorted(values), "a later death left an older checkpoint"
    assert set(values) == {10.0, 20.0, 21.0}


def one_rank_dies(topology: Topology, folder: str, victim: int, at: int) -> None:
    save_value(Path(folder), 10, 10.0, topology.world, Files())
    files = Mortal(at) if topology.rank == victim else Files()
    save_value(Path(folder), 20, 20.0, topology.world, files)


@pytest.mark.parametrize(("victim", "at"), [(1, 3), (0, 11)], ids=["writing", "publishing"])
def test_a_killed_rank_ends_the_others_and_spares_the_last_checkpoint(
    tmp_path: Path, victim: int, at: int
) -> None:
    with pytest.raises(RankFailed, match=f"rank {victim} .*:\nended with exit code 9"):
        run_on(2, one_rank_dies, folder=str(tmp_path), victim=victim, at=at)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000010"]
    assert newest_value(tmp_path) == 10.0


class Watching(Files):
    """Notes what is done to which name."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []

    def write(self, file: BinaryIO, data: memoryview) -> None:
        self.log.append(("write", Path(file.name).name))
        super().write(file, data)

    def fsync(self, file: BinaryIO) -> None:
        self.log.append(("fsync", Path(file.name).name))
        super().fsync(file)

    def fsync_folder(self, folder: Path) -> None:
        self.log.append(("fsync", folder.name.partition(".")[0]))
        super().fsync_folder(folder)

    def rename(self, source: Path, target: Path) -> None:
        self.log.append(("rename", target.name))
        super().rename(source, target)


def test_data_then_manifest_then_folder_are_on_the_device_before_the_name(tmp_path: Path) -> None:
    files = Watching()
    save_value(tmp_path, 10, 1.0, WORLD, files)
    parent, step = tmp_path.name, "step-00000010"
    assert files.log == [
        ("fsync", parent),
        *[("write", "rank-00000.bin")] * 2,
        ("fsync", "rank-00000.bin"),
        ("write", "manifest.json"),
        ("fsync", "manifest.json"),
        ("fsync", step),
        ("rename", step),
        ("fsync", parent),
    ]


@pytest.mark.report("NVIDIA-NeMo/Automodel#3254")
def test_a_stale_partial_folder_is_replaced(tmp_path: Path) -> None:
    partial = step_folder(tmp_path, 10)
    (partial / "deep").mkdir(parents=True)
    (partial / "deep" / "rank-00000.bin").write_bytes(b"half")
    stale = tmp_path / "step-00000010.tmp-dead"
    stale.mkdir()
    (stale / "rank-00000.bin").write_bytes(b"half")
    run_on(2, save_ten, folder=str(tmp_path))
    assert newest_value(tmp_path) == 10.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def saves(topology: Topology, folder: Path, name: str) -> str:
    """A checkpoint over what is no checkpoint, with what every rank is told."""
    with pytest.raises(ValueError) as caught:
        save(folder / name, [], {}, topology.world)
    return str(caught.value)


@pytest.mark.parametrize("name", ["root", "file", "text"])
def test_what_is_no_checkpoint_is_never_removed(name: str, tmp_path: Path) -> None:
    """The folder of checkpoints, a file, and a folder with somebody's text."""
    run_on(2, save_ten, folder=str(tmp_path / "root"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "thesis.txt").write_text("mine")
    (tmp_path / "text" / "manifest.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    for told in run_on(2, saves, folder=tmp_path, name=name):
        assert re.search(r"is a file: save|has other things in it, such as [st].*own", told)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "mine"


def save_ten(topology: Topology, folder: str) -> None:
    save_value(Path(folder), 10, 10.0, topology.world, Files())


def whole(key: str, places: list[Rectangle]) -> Fragment:
    return Fragment(key, (2, 3), places, torch.zeros(sum(place.area for place in places)))


@pytest.mark.parametrize(
    ("places", "saved"),
    [
        ([Rectangle(0, 0, 1, 3)], 3),
        ([Rectangle(0, 0, 2, 3), Rectangle(1, 1, 1, 1)], 7),
        ([Rectangle(0, 0, 2, 2), Rectangle(0, 1, 2, 1)], 6),
    ],
    ids=["missing", "twice", "both"],
)
def test_elements_in_no_fragment_or_in_two_are_refused(
    tmp_path: Path, places: list[Rectangle], saved: int
) -> None:
    save_value(tmp_path, 10, 10.0, WORLD, Files())
    with pytest.raises(ValueError, match=f"weight/a has 6 elements and its fragments {saved}"):
        save(step_folder(tmp_path, 20), [whole("weight/a", places)], {}, WORLD)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert newest_value(tmp_path) == 10.0


def test_parts_of_one_tensor_that_disagree_are_refused(tmp_path: Path) -> None:
    parts = [Fragment.whole("weight/a", torch.zeros(3)), Fragment.whole("weight/a", torch.ones(4))]
    with pytest.raises(ValueError, match=r"weight/a is float32 \[3\] .* and float32 \[4\]"):
        save(tmp_path / "a", parts, {}, WORLD)


class Full(Files):
    """A disk on which the next write fails."""

    def write(self, file: BinaryIO, data: memoryview) -> None:
        raise OSError(28, "No space left on device")


def saves_on_a_full_disk(topology: Topology, folder: str) -> str:
    save_value(Path(folder), 10, 10.0, topology.world, Files())
    try:
        save_value(
            Path(folder), 20, 20.0, topology.world, Full() if topology.rank == 1 else Files()
        )
    except (RuntimeError, OSError) as error:
        return str(error)
    return "no error"


@pytest.mark.report("pytorch/pytorch#77091")
def test_an_error_on_one_rank_is_raised_on_all_and_nothing_is_lost(tmp_path: Path) -> None:
    other, failed = run_on(2, saves_on_a_full_disk, folder=str(tmp_path))
    assert re.match(
        rf"\[Errno 28\] No space left on device: the part of a checkpoint in {tmp_path} that rank "
        r"1 writes needs \d+ bytes, and the disk has [\d,]+ left; earlier checkpoints are as they",
        failed,
    )
    assert other == f"rank 1: {failed}"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
