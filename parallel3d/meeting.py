"""The processes of one start find each other in a store that outlives them.

Note [a store outlives its processes]
torchrun keeps one store for all restarts of its workers, and one for all jobs of a sweep. What an
earlier start wrote there, the addresses of its ranks, would be read by the next one, which then
connects to the dead or waits for them. So each start uses a part of the store under a name of its
own. Counting starts does not give that name: a rank may die before it counts, and torchrun's
agents count restarts differently. Rank 0 draws it, and tells it to who asks with a fresh number.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist


def meet(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.Store:
    """The part of `store` that exactly these `world_size` processes share. Collective.

    Raises:
        RuntimeError: a rank did not come within `timeout` seconds; rank 0 names it.
    """
    name = _call(store, world_size, timeout) if rank == 0 else _ask(store, rank, timeout)
    return dist.PrefixStore(f"meeting/{name}", store)


def _ask(store: dist.Store, rank: int, timeout: float) -> str:
    question = uuid4().hex
    store.set(f"question/{rank}", question)  # replaces that of an earlier start
    try:
        store.wait([f"answer/{question}"], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"rank {rank} waited {timeout:g} s for rank 0, which did not start: see its output"
        ) from error
    name = store.get(f"answer/{question}").decode()
    store.set(f"here/{name}/{rank}", "")
    return name


def _call(store: dist.Store, world_size: int, timeout: float) -> str:
    name, deadline = uuid4().hex, time.monotonic() + timeout
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            if store.check([f"question/{rank}"]):  # perhaps of an earlier start: then nobody reads
                question = store.get(f"question/{rank}").decode()
                store.set(f"answer/{question}", name)
        missing = [rank for rank in missing if not store.check([f"here/{name}/{rank}"])]
        if missing and time.monotonic() > deadline:
            raise RuntimeError(
                f"of {world_size} processes rank {', '.join(map(str, missing))} did not start "
                f"within {timeout:g} s: see their output"
            )
        time.sleep(0.005)
    return name
