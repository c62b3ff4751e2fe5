from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from parallel3d.checkpoint import (
    Files,
    Fragment,
    latest_valid,
    list_checkpoints,
    load,
    prune,
    save,
    step_folder,
    step_of,
)
from parallel3d.placement import Rectangle
from parallel3d.topology import Axis, Topology
from tests.checkpoint.cuttings import damage_file
from tests.world import run_on

WORLD = Axis.single("world")


def save_step(folder: Path, step: int, world: Axis = WORLD, **meta: object) -> None:
    place = [Rectangle(4 * world.rank, 0, 4, 1)]
    fragment = Fragment("a", (4 * world.size,), place, torch.full((4,), float(step)))
    save(step_folder(folder, step), [fragment], {"step": step, **meta}, world)


def steps(folder: Path) -> list[int]:
    return [step_of(checkpoint) for checkpoint in list_checkpoints(folder)]


def test_the_folder_of_a_step_is_named_in_eight_digits() -> None:
    assert step_folder(Path("runs/x"), 100) == Path("runs/x/step-00000100")
    assert step_of(Path("runs/x/step-00000100")) == 100
    assert step_of(step_folder(Path(), 1234567890)) == 1234567890


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ["step-00000020", "step-100000000", "step-00000003", "step-00000009.tmp-ab12"]:
        (tmp_path / name).mkdir()
    for name in ["step-5", "best", "step-00000007x"]:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000008").write_text("a file")
    assert steps(tmp_path) == [3, 20, 100000000]
    assert list_checkpoints(tmp_path / "no-such") == []


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert latest_valid(tmp_path, WORLD) is None
    assert latest_valid(tmp_path / "no-such", WORLD) is None


@pytest.mark.report("vllm-project/speculators#739")
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("missing", "rank-00000.bin"),
        ("truncated", "rank-00000.bin"),
        ("corrupt", "rank-00000.bin"),
        ("missing", "manifest.json"),
        ("truncated", "manifest.json"),
        ("corrupt", "manifest.json"),
    ],
)
def test_a_damaged_newest_one_is_skipped_with_its_name(tmp_path: Path, how: str, name: str) -> None:
    save_step(tmp_path, 10)
    save_step(tmp_path, 20)
    damage_file(step_folder(tmp_path, 20), how, name)
    with pytest.warns(UserWarning, match=r"step-00000020.*; taking .*step-00000010"):
        assert latest_valid(tmp_path, WORLD) == step_folder(tmp_path, 10)


@pytest.mark.report("RLinf/RLinf#1469")
def test_only_damaged_ones_are_an_error_that_names_each(tmp_path: Path) -> None:
    for step in (10, 20):
        save_step(tmp_path, step)
        damage_file(step_folder(tmp_path, step), "truncated")
    with pytest.raises(
        RuntimeError, match=r"no checkpoint that is undamaged: .*20.*; .*10.*; rest"
    ):
        latest_valid(tmp_path, WORLD)


def resume(topology: Topology, folder: str) -> tuple[str, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = latest_valid(Path(folder), topology.world)
    return str(found), len(caught)


def test_all_ranks_take_the_same_checkpoint_and_rank_0_warns(tmp_path: Path) -> None:
    save_step(tmp_path, 10)
    save_step(tmp_path, 20)
    damage_file(step_folder(tmp_path, 20), "corrupt")
    expected = str(step_folder(tmp_path, 10))
    assert run_on(2, resume, folder=str(tmp_path)) == [(expected, 1), (expected, 0)]


class Unreadable(Files):
    """A disk that has lost one file of step 20."""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, path: Path, offset: int = 0, length: int = -1) -> bytes:
        if path.parent.name == "step-00000020" and path.name == self.name:
            raise OSError(5, "Input/output error", str(path))
        return super().read(path, offset, length)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.bin"])
def test_a_checkpoint_that_cannot_be_read_is_a_damaged_one(tmp_path: Path, name: str) -> None:
    save_step(tmp_path, 10)
    save_step(tmp_path, 20)
    with pytest.warns(UserWarning, match="Input/output error"):
        assert latest_valid(tmp_path, WORLD, Unreadable(name)) == step_folder(tmp_path, 10)


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in [(10, 3.0), (20, 1.0), (30, 2.0), (40, 1.0), (50, None), (60, 4.0)]:
        save_step(tmp_path, step, val_loss=loss)
    prune(tmp_path, 2, WORLD)
    assert steps(tmp_path) == [40, 50, 60], "of equally good ones the newest is the best"
    prune(tmp_path, 1, WORLD, best=False)
    assert steps(tmp_path) == [60]


def test_without_a_validation_loss_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path, step)
    prune(tmp_path, 2, WORLD)
    assert steps(tmp_path) == [20, 30]


def test_damaged_ones_do_not_count_and_are_left_alone(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save_step(tmp_path, step)
    damage_file(step_folder(tmp_path, 20), "missing")
    damage_file(step_folder(tmp_path, 40), "truncated")
    prune(tmp_path, 1, WORLD)
    assert steps(tmp_path) == [20, 30, 40]


def test_leftovers_of_interrupted_saves_are_removed(tmp_path: Path) -> None:
    save_step(tmp_path, 10)
    (tmp_path / "step-00000005.tmp-ab12" / "deep").mkdir(parents=True)
    step_folder(tmp_path, 10).rename(tmp_path / "step-00000010.old-ab12")
    assert steps(tmp_path) == [10]
    load(step_folder(tmp_path, 10), [Fragment.whole("a", torch.zeros(4))], WORLD)
    prune(tmp_path, 1, WORLD)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint.keep = 0 must be at least 1"):
        prune(tmp_path, 0, WORLD)


class Owner(Files):
    """Removes on rank 0 only, and only once the newest checkpoint is complete."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder

    def remove_folder(self, folder: Path) -> None:
        assert self.rank == 0, "another rank deletes"
        newest = list_checkpoints(self.folder)[-1]
        assert (newest / "manifest.json").is_file() and newest != folder
        super().remove_folder(folder)


def ten_saves(topology: Topology, folder: str) -> list[int]:
    files = Owner(topology.rank, Path(folder))
    for step in range(1, 11):
        save_step(Path(folder), step, topology.world)
        prune(Path(folder), 2, topology.world, files=files)
    return steps(Path(folder))


@pytest.mark.report("huggingface/transformers#11421")
def test_ten_fast_saves_on_four_ranks_leave_the_two_newest(tmp_path: Path) -> None:
    assert run_on(4, ten_saves, folder=str(tmp_path)) == [[9, 10]] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000009", "step-00000010"]
