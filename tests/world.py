"""Worlds for tests: a function, or a script, on several ranks of this machine.

Ranks are forked from one server process that has torch imported already, so a world of two costs
about 0.2 s and is as isolated as one started from nothing. A world that hangs is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from parallel3d.topology import Grid, Topology

CONTEXT = multiprocessing.get_context("forkserver")
# The first optimizer of a process imports torch._dynamo, which takes seconds.
PRELOADED = (
    "torch torch.distributed torch.distributed.device_mesh torch._dynamo einops numpy pytest "
    "hypothesis tests.preload"
)
CONTEXT.set_forkserver_preload(PRELOADED.split())
GRACE = 3.0  # seconds that the others have to end once a rank has failed


class RankFailed(AssertionError):  # noqa: N818 - reads as what happened
    """Ranks of a world failed; `tracebacks` has them by rank, the first to fail first."""

    def __init__(self, grid: Grid, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        super().__init__("\n" + "\n".join(f"{_name(grid, r)}:\n{t}" for r, t in tracebacks.items()))


def run_on(
    grid: Grid | int,
    fn: Callable[..., Any],
    *,
    timeout: float = 120.0,
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(topology, **kwargs)` on every rank of a fresh world; what each returned, by rank.

    `fn` is a function at the top of a module; arguments and results can be pickled. A number of
    ranks is a grid of that many data-parallel ranks. Warnings on a rank are errors.
    """
    grid = Grid(dp=grid) if isinstance(grid, int) else grid
    call = pickle.dumps((fn, kwargs))
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(grid.size)]
        ranks: list[BaseProcess] = []
        try:
            for rank, (_, sender) in enumerate(pipes):
                args = (rank, grid, folder, device, dict(env or {}), call, sender)
                ranks.append(CONTEXT.Process(target=_rank, args=args))
                ranks[-1].start()
                sender.close()
            return _collect(grid, ranks, [receiver for receiver, _ in pipes], timeout)
        finally:
            _end(ranks)
            for receiver, _ in pipes:
                receiver.close()


def _rank(
    rank: int,
    grid: Grid,
    folder: str,
    device: str,
    env: dict[str, str],
    call: bytes,
    sender: Connection,
) -> None:
    os.environ.update(environment(rank, grid.size), **env)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    try:
        fn, kwargs = pickle.loads(call)
        with Topology.init(
            grid.pp,
            grid.dp,
            grid.tp,
            timeout=60.0,
            device=torch.device(device),
            backend="gloo",
            init_method=f"file://{folder}/rendezvous",
        ) as topology:
            try:
                result = pickle.dumps((True, fn(topology, **kwargs)))
            except BaseException:
                # Told before the topology closes: closing may wait for a rank that never comes.
                sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
                raise
        sender.send_bytes(result)
    except BaseException:
        sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise SystemExit(1) from None


def environment(rank: int, size: int) -> dict[str, str]:
    """What torchrun would set, for a world on one machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # never spoken to: the rendezvous is a file
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _collect(
    grid: Grid, ranks: Sequence[BaseProcess], receivers: Sequence[Connection], timeout: float
) -> list[Any]:
    """Results by rank, once every rank has reported and ended; RankFailed otherwise."""
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    open_ends = dict(zip(receivers, range(grid.size), strict=True))
    while open_ends and (ready := wait(list(open_ends), max(0.0, deadline - time.monotonic()))):
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = open_ends[receiver]
            try:
                fine, value = pickle.loads(receiver.recv_bytes())
            except EOFError:  # the rank has ended
                del open_ends[receiver]
                ranks[rank].join()
                fine, value = rank in results, f"ended with exit code {ranks[rank].exitcode}\n"
            else:
                if fine:
                    results[rank] = value
            if not fine and rank not in failed:
                failed[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE)
    for rank in open_ends.values():
        state = "returned, but did not end" if rank in results else "still running"
        failed.setdefault(rank, f"{state} after {timeout:g} s, or {GRACE:g} s after a failure\n")
    if failed:
        raise RankFailed(grid, failed)
    return [results[rank] for rank in range(grid.size)]


def _name(grid: Grid, rank: int) -> str:
    pp, dp, tp = grid.coordinates(rank)
    return f"rank {rank} (pp {pp}, dp {dp}, tp {tp}) of {grid}"


def _end(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        if process.is_alive():
            process.kill()
    for process in ranks:
        process.join()
        process.close()


def stop_server() -> None:
    """End the process that ranks are forked from, and wait for it: nothing outlives the tests."""
    # It would end by itself, but only some time after this process has.
    forkserver._forkserver._stop()
