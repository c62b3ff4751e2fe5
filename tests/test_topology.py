from __future__ import annotations

import doctest
import os
import warnings
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import parallel3d.topology
from parallel3d.comm.collectives import all_gather, all_reduce, broadcast
from parallel3d.topology import AXES, Axis, Grid, Topology
from tests.start import free_port
from tests.world import run_on

SMALL = [Grid(*degrees) for degrees in product((1, 2, 3, 4), repeat=3)]
degrees = st.integers(1, 8)


# The grid, on paper


def test_the_examples_in_the_docstrings_are_right() -> None:
    assert doctest.testmod(parallel3d.topology) == (0, 1)


@pytest.mark.report("pytorch/torchtitan#286")
@pytest.mark.report("huggingface/picotron#17")
def test_tensor_parallel_neighbours_are_adjacent_and_pipeline_is_outermost() -> None:
    grid = Grid(pp=2, dp=2, tp=2)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.report("pytorch/torchtitan#286")
def test_groups_of_an_axis_tile_the_world_and_two_axes_share_one_rank_at_most() -> None:
    for grid in SMALL:
        groups = {axis: grid.groups(axis) for axis in AXES}
        for axis in AXES:
            assert all(len(group) == getattr(grid, axis) for group in groups[axis])
            assert sorted(chain.from_iterable(groups[axis])) == list(range(grid.size))
        for one, other in (("pp", "dp"), ("pp", "tp"), ("dp", "tp")):
            assert all(len({*a} & {*b}) <= 1 for a in groups[one] for b in groups[other])


@pytest.mark.report("pytorch/torchtitan#286")
def test_rank_and_coordinates_are_inverse() -> None:
    for grid in SMALL:
        for rank in range(grid.size):
            at = grid.coordinates(rank)
            assert grid.rank(*at) == rank
            for axis, position in zip(AXES, at, strict=True):
                (own,) = [group for group in grid.groups(axis) if rank in group]
                assert own[position] == rank, "a group lists its ranks by their coordinate"


def test_a_rank_or_coordinate_outside_the_grid_is_refused() -> None:
    grid = Grid(2, 1, 3)
    with pytest.raises(ValueError, match="rank 6 is not in a grid of 2x1x3 = 6 ranks"):
        grid.coordinates(6)
    with pytest.raises(ValueError, match=r"dp coordinate 1 is not in 0\.\.0"):
        grid.rank(0, 1, 0)
    with pytest.raises(ValueError, match="axis 'ep' is not one of pp, dp, tp"):
        grid.groups("ep")


@given(degrees, degrees, degrees)
def test_a_grid_is_read_back_from_its_text(pp: int, dp: int, tp: int) -> None:
    assert Grid.parse(str(Grid(pp, dp, tp))) == Grid(pp, dp, tp)


@pytest.mark.parametrize("text", ["2x2", "2x2x2x2", "2 x 2 x 2", "2x-1x2", "axbxc", ""])
def test_other_texts_are_no_layouts(text: str) -> None:
    with pytest.raises(ValueError, match="must be pp x dp x tp, for example 2x1x2"):
        Grid.parse(text)


@pytest.mark.parametrize("degree", [0, -1, 1.0, "2"])
def test_a_degree_is_a_whole_number_from_one_up(degree: Any) -> None:
    with pytest.raises(ValueError, match=f"topology.tp = {degree!r} must be a whole number"):
        Grid(tp=degree)


# Inferring a degree, and what is said when it cannot be


@given(degrees, degrees, degrees, st.sampled_from(AXES))
def test_one_degree_is_inferred_from_the_other_two(pp: int, dp: int, tp: int, axis: str) -> None:
    grid = Grid(pp, dp, tp)
    known = {"pp": pp, "dp": dp, "tp": tp, axis: None}
    assert Grid.infer(grid.size, **known) == grid


WRONG = {
    (4, 2, 2, 2): "topology.pp * dp * tp = 2 * 2 * 2 = 8, but 4 processes were started: change "
    "topology.* or --nproc-per-node (nearest: topology.pp=1, or topology.dp=1, or topology.tp=1)",
    (8, 1, 4, 4): "topology.pp * dp * tp = 1 * 4 * 4 = 16, but 8 processes were started: change "
    "topology.* or --nproc-per-node (nearest: topology.dp=2, or topology.tp=2)",
    (4, 1, None, 3): "topology.pp * tp = 1 * 3 = 3, which does not divide the world: 4 processes "
    "were started: change topology.* or --nproc-per-node (nearest: topology.tp=2 or 4)",
    (7, 2, None, 1): "topology.pp * tp = 2 * 1 = 2, which does not divide the world: 7 processes "
    "were started: change topology.* or --nproc-per-node (nearest: topology.pp=1 or 7)",
    (1, 2, None, 1): "topology.pp * tp = 2 * 1 = 2, which does not divide the world: 1 process "
    "was started: change topology.* or --nproc-per-node (nearest: topology.pp=1)",
    (5, 3, 3, 3): "topology.pp * dp * tp = 3 * 3 * 3 = 27, but 5 processes were started: change "
    "topology.* or --nproc-per-node",
}


@pytest.mark.report("Lightning-AI/pytorch-lightning#20391")
@pytest.mark.parametrize(("asked", "message"), WRONG.items(), ids=str)
def test_a_world_of_another_size_is_refused_with_the_nearest_legal_degrees(
    asked: tuple[int, int, int | None, int], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        Grid.infer(*asked)
    assert str(error.value) == message


@given(st.integers(1, 24), degrees, st.none() | degrees, degrees)
def test_every_degree_that_is_advised_is_legal(
    world: int, pp: int, dp: int | None, tp: int
) -> None:
    asked = {"pp": pp, "dp": dp, "tp": tp}
    try:
        assert Grid.infer(world, **asked).size == world
    except ValueError as error:
        _, _, advice = str(error).partition("(nearest: ")
        for option in filter(None, advice.rstrip(")").split(", or ")):
            axis, _, values = option.removeprefix("topology.").partition("=")
            for value in values.split(" or "):
                assert Grid.infer(world, **{**asked, axis: int(value)}).size == world


def test_one_degree_at_most_can_be_inferred() -> None:
    with pytest.raises(ValueError, match="topology.pp and topology.dp are null, but at most one"):
        Grid.infer(4, None, None, 2)


# One process


def test_one_process_without_a_launcher_needs_no_process_group() -> None:
    with Topology.init() as topology:
        assert not dist.is_initialized()
        assert topology.grid == Grid() and topology.rank == 0
        for axis in (topology.pp, topology.dp, topology.tp, topology.world):
            assert (axis.size, axis.rank, axis.ranks, axis.group) == (1, 0, (0,), None)
        assert topology.device.type in ("cpu", "cuda")
        assert topology.describe() == "rank 0 (pp 0, dp 0, tp 0)"
        with pytest.raises(RuntimeError, match="no process group, which a mesh needs: call torch"):
            _ = topology.mesh
    topology.close()


def test_one_process_that_is_asked_for_more_is_told_so() -> None:
    with pytest.raises(ValueError, match="but 1 process was started"):
        Topology.init(pp=1, dp=1, tp=2)


def test_srun_needs_no_master_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM names the first host; the port comes from the job."""
    seen: dict[str, Any] = {}

    def rendezvous(url: str, rank: int, world_size: int, **_: Any) -> Iterator[tuple[Any, ...]]:
        seen.update(init_method=url, rank=rank, world_size=world_size)
        yield dist.HashStore(), rank, world_size

    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    monkeypatch.setattr("parallel3d.topology.meet", lambda store, *_: store)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **about: seen.update(about))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: None)
    for name, value in {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "77",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_JOB_NODELIST": "cn[09-11]",
    }.items():
        monkeypatch.setenv(name, value)
    topology = Topology.init(dp=2, device="cpu")
    assert seen["init_method"].startswith("tcp://cn09:") and seen["rank"] == 1
    assert topology.dp.ranks == (0, 1)


# Worlds


def axes_and_mesh(topology: Topology) -> None:
    grid, rank = topology.grid, topology.rank
    assert topology.world.ranks == tuple(range(grid.size)) and topology.world.rank == rank
    mesh = topology.mesh
    assert mesh is topology.mesh and mesh.mesh_dim_names == AXES
    for name, at in zip(AXES, grid.coordinates(rank), strict=True):
        axis = getattr(topology, name)
        assert (axis.name, axis.rank, axis.size) == (name, at, getattr(grid, name))
        assert list(axis.ranks) in grid.groups(name) and axis.ranks[at] == rank
        assert float(all_reduce(torch.tensor([float(rank)]), axis)) == sum(axis.ranks)
        assert mesh[name].get_local_rank() == at
        beside = Axis.from_mesh(mesh[name])
        assert (beside.name, beside.ranks, beside.rank) == (name, axis.ranks, at)
        assert axis.size == 1 or beside.group is axis.group, "a mesh needs no new communicators"


@pytest.mark.parametrize("grid", [Grid(1, 1, 2), Grid(2, 1, 2)], ids=str)
def test_each_axis_and_the_mesh_beside_it_speak_with_the_ranks_of_the_grid(grid: Grid) -> None:
    run_on(grid, axes_and_mesh)


def rank_filled_after_broadcast(topology: Topology) -> list[float]:
    x = torch.full((2,), float(topology.rank))
    return broadcast(x, topology.dp).tolist()


@pytest.mark.report("deepspeedai/DeepSpeed#2999")
@pytest.mark.report("deepspeedai/Megatron-DeepSpeed#124")
def test_a_broadcast_starts_at_the_first_rank_of_the_axis_not_of_the_world() -> None:
    results = run_on(Grid(dp=2, tp=2), rank_filled_after_broadcast)
    assert results == [[0, 0], [1, 1], [0, 0], [1, 1]]


def a_user_s_own_groups(topology: Topology) -> None:
    """The default group is the user's: it is used, and outlives the topology."""
    with Topology.init(tp=2) as beside:
        assert beside.grid == Grid(dp=2, tp=2)
        assert int(all_reduce(torch.tensor([topology.rank]), beside.tp)) in (1, 5)
        group = beside.tp.group
    beside.close()
    assert dist.is_initialized() and beside.tp.group is None
    with pytest.raises(ValueError, match="group|Group"):
        dist.get_rank(group)

    evens = dist.new_group([0, 2])
    if topology.rank in (0, 2):
        axis = Axis.from_group(evens, "heads")
        assert (axis.name, axis.rank, axis.ranks) == ("heads", topology.rank // 2, (0, 2))
        assert all_gather(torch.tensor([topology.rank]), axis, 0).tolist() == [0, 2]
    else:
        with pytest.raises(ValueError, match=f"rank {topology.rank} is not a member of the group"):
            Axis.from_group(evens)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "heads"))
    assert Axis.from_mesh(mesh["heads"]).name == "heads"
    assert Axis.from_mesh(mesh["replicas"], name="dp").name == "dp"
    with pytest.raises(ValueError, match="a mesh of 2 dims is no axis: slice it"):
        Axis.from_mesh(mesh)


def test_the_layers_axis_may_be_a_group_or_a_mesh_of_the_user() -> None:
    run_on(4, a_user_s_own_groups)


def permuted(topology: Topology) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([2, 0, 3, 1]), mesh_dim_names=("tp",))
    with pytest.raises(ValueError, match=r"lists its ranks as \[2, 0, 3, 1\], but its process gr"):
        Axis.from_mesh(mesh)
    with pytest.raises(TypeError, match="ranks"):
        Topology.init(pp=4, ranks=[2, 0, 3, 1])  # type: ignore[call-arg]


@pytest.mark.report("pytorch/pytorch#193224")
def test_an_order_of_ranks_that_would_be_lost_is_refused() -> None:
    run_on(4, permuted)


def spanning(topology: Topology) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Topology.init(tp=2).close()
        number = len(caught)
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
        Topology.init(tp=2).close()
        assert len(caught) == number, "without a launcher nobody knows the nodes"
    texts = [str(warning.message) for warning in caught]
    assert all("topology.tp = 2 spans nodes of 1 processes" in text for text in texts)
    return len(texts)


def test_tp_that_spans_nodes_warns_once_and_no_other_does() -> None:
    assert run_on(2, spanning, env={"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}) == [1, 0]
    assert run_on(2, spanning) == [0, 0]


def twice(topology: Topology, folder: str, port: int) -> None:
    """Worlds one after the other in one process, by file and by the launcher's variables."""
    topology.close()
    topology.close()
    assert not dist.is_initialized()
    for init in (f"file://{folder}/second", None):
        os.environ["MASTER_PORT"] = str(port)
        with Topology.init(tp=2, device="cpu", init_method=init, timeout=30) as again:
            assert int(all_reduce(torch.tensor([1]), again.tp)) == 2
        assert not dist.is_initialized()


def test_worlds_follow_one_another_in_one_process(tmp_path: Path) -> None:
    run_on(Grid(tp=2), twice, folder=str(tmp_path), port=free_port())


def wrong_degrees(topology: Topology) -> str:
    """Raised on every rank before anything is sent."""
    with pytest.raises(ValueError, match="topology.tp=1 or 2") as error:
        Topology.init(tp=3)
    return str(error.value)


def test_all_ranks_refuse_wrong_degrees_alike() -> None:
    first, second = run_on(2, wrong_degrees)
    assert first == second


def one_rank_world(topology: Topology, x: Tensor) -> None:
    topology = Topology.init(device="cpu")
    assert topology.world.group is None and torch.equal(all_reduce(x, topology.world), x)


def test_a_launcher_s_world_of_one_has_no_group_either() -> None:
    run_on(1, one_rank_world, x=torch.ones(2))
