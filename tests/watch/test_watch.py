"""The watch beside an engine: when it runs, when it ends, and what it leaves alone."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import nn

from parallel3d import Engine
from parallel3d.topology import Grid, Topology
from parallel3d.watch import watch_over
from tests.world import run_on


def engine_on(topology: Topology) -> Engine:
    return Engine(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
        topology,
        loss_fn=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        num_microbatches=2,
        timeout=30.0,
    )


def watches() -> int:
    return sum(thread.name == "parallel3d-watch" for thread in threading.enumerate())


def life(topology: Topology) -> list[int]:
    """The watch's threads and the axes' listeners: with one engine, with two, after the end."""
    counts = []
    for _ in range(2):
        engine = engine_on(topology)
        engine.train_step(torch.ones(2, 4), torch.ones(2, 1))
        counts += [watches(), len(topology.world.observers)]
    topology.close()
    return [*counts, watches(), len(topology.world.observers)]


def test_a_topology_has_one_watch_which_ends_with_it() -> None:
    assert run_on(Grid(dp=2), life) == [[1, 1, 1, 1, 0, 0]] * 2


def refused(topology: Topology) -> float:
    engine = engine_on(topology)
    with pytest.raises(ValueError, match="x is None on the first stage"):
        engine.train_step(None, torch.ones(2, 1))
    return engine.train_step(torch.ones(2, 4), torch.ones(2, 1)).loss


def test_a_refused_call_ends_nobody() -> None:
    first, second = run_on(Grid(dp=2), refused)
    assert first == second


def test_one_process_alone_is_not_watched() -> None:
    topology = Topology.init(device="cpu")
    engine = engine_on(topology)
    engine.train_step(torch.ones(2, 4), torch.ones(2, 1))
    assert watches() == 0
    assert topology.world.observers == []


def test_a_phase_ends_where_the_one_around_it_goes_on() -> None:
    watch = watch_over(Topology.init(device="cpu"), 30.0)
    seen = []
    with watch.during("evaluation"):
        for item in watch.each("data loading", iter("ab")):
            seen.append((item, watch.notes.activity.phase))
        with pytest.raises(KeyError), watch.during("a load"):
            raise KeyError("x")
        assert watch.notes.activity.phase == "a load", "an error keeps it until something follows"
    assert seen == [("a", "evaluation"), ("b", "evaluation")]
    assert watch.notes.activity.phase == "the caller's code"
