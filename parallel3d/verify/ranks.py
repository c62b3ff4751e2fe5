"""Ranks on this machine, forked from one server that has torch imported already.

A world costs about 0.2 s instead of the seconds of as many interpreters.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ..topology import Grid, Topology

CONTEXT = multiprocessing.get_context("forkserver")
# torch.optim imports torch._dynamo in its first step: seconds, paid once by the server.
PRELOADED = ["__main__", "torch._dynamo", "parallel3d.verify"]


class RankError(RuntimeError):
    """A rank raised; ``error`` is what it raised, the first of all ranks."""

    def __init__(self, where: str, error: BaseException, text: str) -> None:
        super().__init__(f"{where}:\n{text}")
        self.where, self.error = where, error


def run(
    grid: Grid, body: Callable[..., Iterator[Any]], *args: Any, timeout: float = 300.0
) -> Iterator[Any]:
    """What ``body(topology, *args)`` yields on rank 0 of a fresh world of CPU ranks, as it comes.

    Raises RankError as soon as a rank raises or ends, and when nothing comes for ``timeout``
    seconds; no process is left.
    """
    CONTEXT.set_forkserver_preload(PRELOADED)
    call = pickle.dumps((body, args))
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        ranks: list[BaseProcess] = []
        ends: list[Connection] = []
        try:
            for rank in range(grid.size):
                mine, theirs = CONTEXT.Pipe(duplex=False)
                ends.append(mine)
                ranks.append(CONTEXT.Process(target=_rank, args=(grid, rank, folder, call, theirs)))
                ranks[-1].start()
                theirs.close()
            yield from _collect(grid, ends, timeout)
        finally:
            _end(ranks)
            for end in ends:
                end.close()


def _collect(grid: Grid, ends: Sequence[Connection], timeout: float) -> Iterator[Any]:
    at = {end: rank for rank, end in enumerate(ends)}
    while at:
        ready = wait(list(at), timeout)
        if not ready:
            names = ", ".join(f"rank {rank}" for rank in at.values())
            error = TimeoutError(f"nothing came from {names} for {timeout:g} s")
            raise RankError(str(grid), error, str(error))
        for end in ready:
            assert isinstance(end, Connection)
            kind, value = _receive(end)
            if kind == "value":
                yield value
            elif kind == "done":
                del at[end]
            else:
                coordinates = "pp {}, dp {}, tp {}".format(*grid.coordinates(at[end]))
                raise RankError(f"rank {at[end]} ({coordinates}) of {grid}", *value)


def _receive(end: Connection) -> tuple[str, Any]:
    try:
        kind, value = pickle.loads(end.recv_bytes())
    except EOFError:
        error = RuntimeError("the process ended without a word")
        return "error", (error, str(error))
    return kind, value


def _rank(grid: Grid, rank: int, folder: str, call: bytes, end: Connection) -> None:
    os.environ.update(_environment(rank, grid.size))
    torch.set_num_threads(1)
    try:
        body, args = pickle.loads(call)
        where = f"file://{folder}/rendezvous"
        with Topology.init(grid.pp, grid.dp, grid.tp, device="cpu", init_method=where) as topology:
            try:
                for value in body(topology, *args):
                    if rank == 0:
                        end.send_bytes(pickle.dumps(("value", value)))
            except BaseException as error:
                # Told at once: the way out of the topology may wait for others.
                end.send_bytes(_error(error))
                raise
        end.send_bytes(pickle.dumps(("done", None)))
    except Exception as error:
        end.send_bytes(_error(error))


def _error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        return pickle.dumps(("error", (error, text)))
    except Exception:
        return pickle.dumps(("error", (RuntimeError(str(error)), text)))


def _environment(rank: int, size: int) -> dict[str, str]:
    """What a launcher would set for a world on one machine, and the loopback interface for gloo."""
    found = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in found), None)
    interface = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        **interface,
    }


def _end(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        if process.is_alive():
            process.kill()
    for process in ranks:
        process.join()
        process.close()
