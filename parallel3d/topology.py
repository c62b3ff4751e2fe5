"""The grid of ranks (pure arithmetic) and the same grid with process groups."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch.distributed.device_mesh import DeviceMesh

from .launch import Launch, device_index
from .meeting import meet

AXES = ("pp", "dp", "tp")
MARGIN = 30.0  # seconds that a group waits longer, so that the watch can say who is missing


@dataclass(frozen=True)
class Grid:
    """Degrees of the three axes. Pure arithmetic: needs no process group.

    Ranks are laid out row-major as ``pp dp tp``, so tensor-parallel neighbours are adjacent
    ranks (they share a node when ``tp`` divides the GPUs of one) and pipeline neighbours are
    the farthest apart.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or degree < 1:
                raise ValueError(f"topology.{axis} = {degree!r} must be a whole number from 1 up")

    def __str__(self) -> str:
        return f"{self.pp}x{self.dp}x{self.tp}"

    @classmethod
    def parse(cls, text: str) -> Grid:
        """``Grid.parse("2x1x4")``: pp, dp, tp."""
        if not re.fullmatch(r"\d+x\d+x\d+", text):
            raise ValueError(f"layout {text!r} must be pp x dp x tp, for example 2x1x2")
        return cls(*map(int, text.split("x")))

    @classmethod
    def infer(
        cls, world_size: int, pp: int | None = 1, dp: int | None = None, tp: int | None = 1
    ) -> Grid:
        """The grid of ``world_size`` ranks; at most one degree may be None and is inferred."""
        degrees = {"pp": pp, "dp": dp, "tp": tp}
        unknown = [axis for axis in AXES if degrees[axis] is None]
        if len(unknown) > 1:
            raise ValueError(
                f"topology.{' and topology.'.join(unknown)} are null, but at most one can be "
                f"inferred: give the others"
            )
        known = {axis: degree for axis, degree in degrees.items() if degree is not None}
        product = cls(**known).size
        text = f"topology.{' * '.join(known)} = {' * '.join(map(str, known.values()))} = {product}"
        started = f"{world_size} {'process was' if world_size == 1 else 'processes were'} started"
        advice = _advice(world_size, known)
        if not unknown and product != world_size:
            raise ValueError(f"{text}, but {started}: {advice}")
        if unknown and world_size % product:
            raise ValueError(f"{text}, which does not divide the world: {started}: {advice}")
        return cls(**known, **dict.fromkeys(unknown, world_size // product))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """``(pp, dp, tp)`` of a rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a grid of {self} = {self.size} ranks")
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def rank(self, pp: int, dp: int, tp: int) -> int:
        """The rank at a coordinate; the inverse of ``coordinates``."""
        for axis, at in zip(AXES, (pp, dp, tp), strict=True):
            if not 0 <= at < getattr(self, axis):
                raise ValueError(f"{axis} coordinate {at} is not in 0..{getattr(self, axis) - 1}")
        return (pp * self.dp + dp) * self.tp + tp

    def groups(self, axis: str) -> list[list[int]]:
        """Every group of ranks that differ only along ``axis``; together they tile the world.

        >>> Grid(2, 2, 2).groups("dp")
        [[0, 2], [1, 3], [4, 6], [5, 7]]
        """
        if axis not in AXES:
            raise ValueError(f"axis {axis!r} is not one of {', '.join(AXES)}")
        ranks = torch.arange(self.size).view(self.pp, self.dp, self.tp)
        others = " ".join(other for other in AXES if other != axis)
        groups: list[list[int]] = rearrange(ranks, f"pp dp tp -> ({others}) {axis}").tolist()
        return groups


def _advice(world_size: int, degrees: dict[str, int]) -> str:
    """The way out: the nearest legal value of each degree, the others kept."""
    options = []
    for axis, degree in degrees.items():
        rest = Grid(**{a: d for a, d in degrees.items() if a != axis}).size
        exact = len(degrees) == len(AXES)
        legal = [
            d
            for d in range(1, world_size + 1)
            if (rest * d == world_size if exact else world_size % (rest * d) == 0)
        ]
        near = sorted(sorted(legal, key=lambda d: abs(d - degree))[:2])
        if near and degree not in near:
            options.append(f"topology.{axis}={' or '.join(map(str, near))}")
    nearest = f" (nearest: {', or '.join(options)})" if options else ""
    return f"change topology.* or --nproc-per-node{nearest}"


@dataclass(frozen=True, eq=False)
class Axis:
    """One rank's view of a group of ranks: what a communicating function is given.

    ``rank`` is the own position in ``ranks``, which are global ranks. ``observers`` are called
    with every communication event on this axis (see ``comm/ledger.py``); the last of ``memos``, if
    any, knows results of collectives that need not be sent for again (``comm/memo.py``).
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    observers: list[Callable[[Any], None]] = field(default_factory=list, repr=False)
    memos: list[Any] = field(default_factory=list, repr=False)

    @classmethod
    def single(cls, name: str = "tp") -> Axis:
        """An axis of one rank: nothing is ever sent."""
        return cls(name, 1, 0, (0,))

    @classmethod
    def from_group(cls, group: dist.ProcessGroup, name: str = "tp") -> Axis:
        """The axis of an existing process group. ValueError on a rank that is not in it."""
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not a member of the group given for {name}"
            )
        ranks = tuple(dist.get_process_group_ranks(group))
        return cls(name, len(ranks), rank, ranks, group)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, name: str | None = None) -> Axis:
        """The axis of a one-dimensional DeviceMesh, for example ``mesh["tp"]``.

        Raises ValueError for a mesh of more dims, and for one whose ranks are not in ascending
        order: its process group would have another order than the mesh.
        """
        if mesh.ndim != 1:
            raise ValueError(f"a mesh of {mesh.ndim} dims is no axis: slice it, as in mesh['tp']")
        names = mesh.mesh_dim_names or ("tp",)
        axis = cls.from_group(mesh.get_group(), name or names[0])
        order = mesh.mesh.tolist()
        if order != list(axis.ranks):
            raise ValueError(
                f"the mesh lists its ranks as {order}, but its process group orders them as "
                f"{list(axis.ranks)}: give the mesh ascending ranks"
            )
        return axis


class Topology:
    """A grid with process groups: the axes this rank speaks on, and its device.

    Use as a context manager, or call ``close()``. Made by ``Topology.init``. ``channels`` are those
    that ``comm.p2p`` has opened between pipeline ranks, by edge; ``lines`` the axes over some
    ranks of an axis that ``comm.lines`` has, by those ranks. ``store`` is where the ranks met, None
    for one process alone, and ``watch`` what watches over them (see ``watch.watch_over``).
    """

    def __init__(
        self,
        grid: Grid,
        axes: dict[str, Axis],
        device: torch.device,
        owner: bool,
        store: dist.Store | None = None,
    ) -> None:
        self.grid = grid
        self.pp, self.dp, self.tp = (axes[name] for name in AXES)
        self.world = axes["world"]
        self.rank = self.world.rank
        self.device = device
        self.channels: dict[Any, Any] = {}
        self.lines: dict[Any, Axis | None] = {}
        self.store = store
        self.watch: Any = None
        self._owner, self._closed = owner, False

    @classmethod
    def init(
        cls,
        pp: int | None = 1,
        dp: int | None = None,
        tp: int | None = 1,
        *,
        timeout: float = 600.0,
        device: str | torch.device | None = None,
        backend: str | None = None,
        init_method: str | None = None,
    ) -> Topology:
        """Join the world that the launcher describes (torchrun, or SLURM's srun) as a grid.

        One degree may be None and is inferred. Without a launcher this is one process, 1x1x1,
        and no process group is made. CUDA devices speak NCCL, the CPU gloo; ``backend`` and
        ``device`` override this (several gloo ranks on one GPU, for tests). ``timeout`` in
        seconds is how long ranks wait for each other, here and, ``MARGIN`` longer, in every group;
        ``init_method`` is torch's, the launcher's if None. An initialised default group is used
        and left alone.

        Raises ValueError, on every rank and before any communication, when the degrees do not
        multiply to the number of processes.
        """
        launch = Launch.from_environment(os.environ)
        joined = dist.is_initialized()
        if joined and "cpu:" not in dist.get_backend_config():
            raise ValueError(
                f"the process group at hand has the backend {dist.get_backend_config()}, and none "
                f"for the host's messages: init_process_group('cpu:gloo,cuda:nccl')"
            )
        size = dist.get_world_size() if joined else launch.world_size
        grid = Grid.infer(size, pp, dp, tp)
        where = _device(device, launch)
        if grid.size == 1 and not joined:
            axes = {name: Axis.single(name) for name in (*AXES, "world")}
            return cls(grid, axes, where, owner=False)
        if joined:
            store = dist.distributed_c10d._get_default_store()
        else:
            store = _join(launch, where, timeout, backend, init_method)
        # A world that no launcher made says nothing about nodes.
        launched = launch.world_size == grid.size
        if launched and launch.local_world_size % grid.tp and dist.get_rank() == 0:
            warnings.warn(
                f"topology.tp = {grid.tp} spans nodes of {launch.local_world_size} processes: its "
                f"all-reduces cross the network; a tp that divides them stays inside a node",
                stacklevel=2,
            )
        return cls(grid, _axes(grid, timeout), where, owner=not joined, store=store)

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The same grid as a DeviceMesh with dims ``pp dp tp``, for DTensor or FSDP2 beside us.

        It speaks on the axes' own groups. The first use is collective over the world: an axis of
        one rank gets its group then. RuntimeError on one process that has no process group.
        """
        if not dist.is_initialized():
            raise RuntimeError(
                "one process alone has no process group, which a mesh needs: call "
                "torch.distributed.init_process_group before Topology.init"
            )
        ranks = torch.arange(self.grid.size).view(self.grid.pp, self.grid.dp, self.grid.tp)
        alone: dist.ProcessGroup | None = None
        if 1 in ranks.shape:
            for rank in range(self.grid.size):
                group = dist.new_group([rank])
                alone = group if rank == self.rank else alone
        groups = [axis.group if axis.size > 1 else alone for axis in (self.pp, self.dp, self.tp)]
        present = [group for group in groups if group is not None]
        return DeviceMesh.from_group(present, self.device.type, ranks, mesh_dim_names=AXES)

    def describe(self) -> str:
        """``rank 5 (pp 1, dp 0, tp 1)``, as error notes spell it."""
        return f"rank {self.rank} (pp {self.pp.rank}, dp {self.dp.rank}, tp {self.tp.rank})"

    def close(self) -> None:
        """Destroy the process groups this topology made. A second call does nothing.

        Collective: a rank that left while another still reads from it would end that one.
        """
        if self._closed:
            return
        self._closed = True
        if self.watch is not None:
            self.watch.close()
        if self._owner and dist.is_initialized():
            dist.barrier()
            self._stop_watch()
            dist.barrier()  # the store stays until nobody watches it any more
            dist.destroy_process_group()
        elif dist.is_initialized():
            self._stop_watch()
            made = (*self.channels.values(), *self.lines.values(), self.pp, self.dp, self.tp)
            for end in made:
                if end is not None and end.group is not None:
                    dist.destroy_process_group(end.group)
        self._let_go()

    def _stop_watch(self) -> None:
        if self.watch is not None:
            self.watch.stop()

    def _let_go(self) -> None:
        """Drop every reference to a group, which ends its threads.

        One that still ran when the interpreter is taken down would abort the process.
        """
        for channel in self.channels.values():
            if channel is not None:
                channel.close()
        self.store = None
        for axis in (self.world, self.pp, self.dp, self.tp, *self.lines.values()):
            if axis is not None:
                object.__setattr__(axis, "group", None)

    def __enter__(self) -> Topology:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error peers may never join again: destroying would wait for them. The process
        # is about to end, which is what tells them.
        if error is None:
            self.close()


def _device(device: str | torch.device | None, launch: Launch) -> torch.device:
    if device is not None:
        where = torch.device(device)
    elif torch.cuda.is_available():
        where = torch.device("cuda", device_index(launch.local_rank, torch.cuda.device_count()))
    else:
        where = torch.device("cpu")
    if where.type == "cuda":
        torch.cuda.set_device(where)
    return where


def _join(
    launch: Launch, device: torch.device, timeout: float, backend: str | None, init: str | None
) -> dist.Store:
    nccl = device.type == "cuda" and backend is None
    if init is None and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        # srun sets neither; both are known from SLURM's variables.
        host, port = launch.master_addr, launch.master_port
        init = None if None in (host, port) else f"tcp://{host}:{port}"
    rank, world_size, limit = launch.rank, launch.world_size, timedelta(seconds=timeout)
    store, _, _ = next(dist.rendezvous(init or "env://", rank, world_size, timeout=limit))
    store = meet(store, rank, world_size, timeout)
    dist.init_process_group(
        # Host messages (shapes, errors, names) go by gloo also where tensors go by NCCL.
        backend or ("cpu:gloo,cuda:nccl" if nccl else "gloo"),
        store=store,
        world_size=world_size,
        rank=rank,
        timeout=timedelta(seconds=timeout + MARGIN),
        device_id=device if nccl else None,
    )
    return store


def _axes(grid: Grid, timeout: float) -> dict[str, Axis]:
    """Every rank makes every group, in one order; each keeps the ones it is in."""
    me = dist.get_rank()
    world = Axis("world", grid.size, me, tuple(range(grid.size)), dist.group.WORLD)
    axes = {"world": world}
    for name, at in zip(AXES, grid.coordinates(me), strict=True):
        for ranks in grid.groups(name):
            group = None
            if len(ranks) > 1:
                group = dist.new_group(ranks, timeout=timedelta(seconds=timeout + MARGIN))
            if me in ranks:
                axes[name] = Axis(name, len(ranks), at, tuple(ranks), group)
    return axes
