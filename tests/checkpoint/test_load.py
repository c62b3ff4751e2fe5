from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.checkpoint import Files, Fragment, load, save
from parallel3d.comm.collectives import gather_objects
from parallel3d.placement import Rectangle
from parallel3d.topology import Axis, Topology
from tests.checkpoint.cuttings import (
    DTYPES,
    check_equal,
    random_tensors,
    scatter,
    sharded,
    tensor_of,
)
from tests.world import run_on

WORLD = Axis.single("world")


def first_ranks(topology: Topology, sizes: list[int]) -> dict[int, Axis]:
    """Worlds made of the first so many ranks; those that this rank is in."""
    if topology.world.size == 1:
        return {1: Axis.single("world")}
    groups = {size: dist.new_group(range(size)) for size in sizes}
    return {
        size: Axis.from_group(group, "world")
        for size, group in groups.items()
        if topology.rank < size
    }


def any_cutting_loads_as_any_other(topology: Topology, folder: str, seeds: int) -> None:
    axes = first_ranks(topology, [1, 2, 3, 4])
    for seed in range(seeds):
        rng = random.Random(seed)
        tensors = random_tensors(rng, 12)
        saver, loader = rng.randint(1, 4), rng.randint(1, 4)
        checkpoint = Path(folder, str(seed))
        parts = scatter(rng, tensors, saver)
        wanted = scatter(rng, tensors, loader, blank=True)
        if saver in axes:
            world = axes[saver]
            save(checkpoint, parts[world.rank], {"seed": seed}, world, block_bytes=64)
        dist.barrier()
        if loader in axes:
            mine = wanted[axes[loader].rank]
            assert load(checkpoint, mine, axes[loader]) == {"seed": seed}
            check_equal(mine, tensors)


def test_any_cutting_on_any_number_of_ranks_loads_as_any_other(tmp_path: Path) -> None:
    run_on(4, any_cutting_loads_as_any_other, folder=str(tmp_path), seeds=25)


@pytest.mark.parametrize("seed", range(20))
def test_one_process_reads_what_was_cut_into_many_fragments(tmp_path: Path, seed: int) -> None:
    rng = random.Random(1000 + seed)
    tensors = random_tensors(rng, 8)
    parts = [fragment for rank in scatter(rng, tensors, 5) for fragment in rank]
    save(tmp_path / "a", parts, {}, WORLD)
    wanted = [Fragment.whole(key, torch.zeros_like(whole)) for key, whole in tensors.items()]
    load(tmp_path / "a", wanted, WORLD)
    for fragment in wanted:
        assert torch.equal(fragment.data, tensors[fragment.key].flatten()), fragment.key


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = tensor_of(random.Random(0), (5, 3), dtype)
    if dtype.is_floating_point:
        tensor[0] = torch.tensor([float("nan"), float("-inf"), -0.0])
    save(tmp_path / "a", [Fragment.whole("a", tensor)], {}, WORLD)
    target = torch.zeros_like(tensor)
    load(tmp_path / "a", [Fragment.whole("a", target)], WORLD)
    assert torch.equal(target.view(torch.uint8), tensor.view(torch.uint8))


def test_data_that_is_a_strided_view_is_saved_and_filled(tmp_path: Path) -> None:
    columns = torch.arange(12.0).view(6, 2)
    place = [Rectangle(0, 0, 2, 3)]
    save(tmp_path / "a", [Fragment("a", (2, 3), place, columns[:, 1])], {}, WORLD)
    target = torch.zeros(6, 2)
    load(tmp_path / "a", [Fragment("a", (2, 3), place, target[:, 0])], WORLD)
    assert torch.equal(target, torch.stack([columns[:, 1], torch.zeros(6)], dim=1))


def test_a_parameter_that_needs_gradients_is_filled_in_place(tmp_path: Path) -> None:
    save(tmp_path / "a", [Fragment.whole("a", torch.ones(4))], {}, WORLD)
    parameter = torch.nn.Parameter(torch.zeros(4))
    place = [Rectangle(0, 0, 4, 1)]
    load(tmp_path / "a", [Fragment("a", (4,), place, parameter)], WORLD)
    assert torch.equal(parameter, torch.ones(4)) and parameter.grad_fn is None


def test_several_ranks_may_want_the_same_elements(tmp_path: Path) -> None:
    save(tmp_path / "a", [Fragment.whole("a", torch.arange(4.0))], {}, WORLD)
    twice = [Fragment.whole("a", torch.zeros(4)) for _ in range(2)]
    load(tmp_path / "a", twice, WORLD)
    assert all(torch.equal(fragment.data, torch.arange(4.0)) for fragment in twice)


SHAPES = {"weight/a": (1, 17), "weight/b": (5, 3), "weight/c": (7,), "exp_avg/a": (1, 17)}


def zero_parts(
    tensors: dict[str, Tensor], dp: int, tp: int, rank: int, blank: bool
) -> list[Fragment]:
    """What a rank holds under ZeRO; matrices are cut over tp, vectors are replicated."""
    return [
        fragment
        for key, whole in tensors.items()
        for fragment in sharded(
            key, whole, dp, tp, rank, 0 if whole.ndim == 2 else None, blank=blank
        )
    ]


def reshard(
    topology: Topology, folder: str, saver: tuple[int, int], loaders: list[tuple[int, int]]
) -> int:
    axes = first_ranks(topology, list(range(1, topology.world.size + 1)))
    rng = random.Random(0)
    tensors = {key: tensor_of(rng, shape, torch.float32) for key, shape in SHAPES.items()}
    size = saver[0] * saver[1]
    if size in axes:
        save(Path(folder), zero_parts(tensors, *saver, topology.rank, False), {}, axes[size])
    dist.barrier()
    elements = 0
    for dp, tp in loaders:
        if dp * tp in axes:
            mine = zero_parts(tensors, dp, tp, topology.rank, True)
            load(Path(folder), mine, axes[dp * tp])
            check_equal(mine, tensors)
            elements += sum(fragment.data.numel() for fragment in mine)
    return elements


@pytest.mark.report("deepspeedai/DeepSpeed#3810")
@pytest.mark.report("deepspeedai/DeepSpeed#7628")
@pytest.mark.parametrize(
    ("saver", "loaders"),
    [(4, [1, 2, 3, 8]), (3, [2])],
    ids=["from four", "from three"],
)
def test_zero_shards_load_whole_under_another_data_parallel_size(
    tmp_path: Path, saver: int, loaders: list[int]
) -> None:
    loaded = run_on(
        max([*loaders, saver]),
        reshard,
        folder=str(tmp_path / "a"),
        saver=(saver, 1),
        loaders=[(dp, 1) for dp in loaders],
    )
    assert sum(loaded) == len(loaders) * (17 + 15 + 7 + 17)


@pytest.mark.report("pytorch/pytorch#136228")
def test_dims_that_do_not_divide_and_ranks_without_rows_reshard(tmp_path: Path) -> None:
    loaders = [(3, 1), (1, 1), (2, 4), (1, 3)]
    run_on(8, reshard, folder=str(tmp_path / "a"), saver=(4, 2), loaders=loaders)


class Counting(Files):
    """Counts the bytes of data files that are read to check them, and to fill fragments."""

    def __init__(self) -> None:
        self.checked = 0
        self.filled = 0

    def read(self, path: Path, offset: int = 0, length: int = -1) -> bytes:
        data = super().read(path, offset, length)
        self.checked += len(data) if path.suffix == ".bin" else 0
        return data

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.filled += source.nbytes
        super().copy(source, target)


def count_bytes(topology: Topology, folder: str) -> list[tuple[int, int, int]]:
    """Of each loading world: a rank's share of all bytes, those checked, those filled."""
    axes = first_ranks(topology, [4, 8])
    whole = {"weight/a": torch.arange(64.0 * 32).view(64, 32)}
    save(Path(folder), zero_parts(whole, 8, 1, topology.rank, False), {}, axes[8], block_bytes=128)
    counts = []
    for dp, tp in [(8, 1), (4, 1), (2, 4)]:
        if dp * tp in axes:
            files = Counting()
            mine = zero_parts(whole, dp, tp, topology.rank, True)
            load(Path(folder), mine, axes[dp * tp], files=files)
            counts.append((64 * 32 * 4 // (dp * tp), files.checked, files.filled))
    return counts


@pytest.mark.report("deepspeedai/DeepSpeed#1111")
def test_a_rank_reads_twice_its_own_share_and_not_the_total(tmp_path: Path) -> None:
    for counts in run_on(8, count_bytes, folder=str(tmp_path / "a")):
        for share, checked, filled in counts:
            assert checked == share and filled == share


def bytes_told(topology: Topology, folder: str) -> int:
    """The largest message of a rank while it saves a quarter of 1 MiB."""
    whole = {"weight/a": torch.ones(512, 512)}
    sizes: list[int] = []

    def gather(obj: object, axis: Axis) -> list[object]:
        sizes.append(len(pickle.dumps(obj)))
        return gather_objects(obj, axis)

    with mock.patch.object(sys.modules["parallel3d.checkpoint.save"], "gather_objects", gather):
        save(Path(folder), zero_parts(whole, 4, 1, topology.rank, False), {}, topology.world)
    return max(sizes)


@pytest.mark.report("facebookresearch/fairscale#844")
def test_a_rank_writes_its_own_share_and_tells_no_other_a_value(tmp_path: Path) -> None:
    assert max(run_on(4, bytes_told, folder=str(tmp_path / "a"))) < 1000
    sizes = [path.stat().st_size for path in (tmp_path / "a").glob("*.bin")]
    assert sizes == [512 * 512] * 4


@pytest.mark.report("pytorch/pytorch#113673")
def test_equal_shapes_in_another_order_find_their_own_values(tmp_path: Path) -> None:
    keys = [f"{kind}/{layer}.weight" for layer in range(6) for kind in ("weight", "exp_avg")]
    values = {key: float(at) for at, key in enumerate(keys)}
    save(
        tmp_path / "a",
        [Fragment.whole(k, torch.full((3,), v)) for k, v in values.items()],
        {},
        WORLD,
    )
    wanted = [
        Fragment.whole(key, torch.zeros(3)) for key in random.Random(0).sample(keys, len(keys))
    ]
    load(tmp_path / "a", wanted, WORLD)
    assert {fragment.key: fragment.data.unique().item() for fragment in wanted} == values
