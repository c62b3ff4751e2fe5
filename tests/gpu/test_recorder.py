"""A step of several ranks on one GPU, timed by events. Run where there is a GPU."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from time import perf_counter

import pytest
import torch
from torch import nn

from parallel3d import Engine, Grid, Topology
from parallel3d.log.clock import clock_of, host_offset
from parallel3d.log.recorder import Recorder, Recording, Window
from parallel3d.pipeline.actions import COMPUTE, Action
from tests.world import run_on

pytestmark = pytest.mark.gpu


def recorded(topology: Topology) -> tuple[list[Action], Recording, Window, float, float]:
    """A rank's program, its second step, and the host's time before and after it."""
    torch.manual_seed(0)
    engine = Engine(
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]),
        topology,
        loss_fn=nn.MSELoss(reduction="sum"),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        schedule="zb-h1",
        num_microbatches=4,
    )
    recorder = Recorder(clock_of(topology.device), host_offset(topology.world))
    x = torch.ones(8, 64)
    for _ in range(2):
        before = perf_counter()
        with recorder.listening(engine.parts.interpreter):
            engine.train_step(x, x)
    return engine.parts.programs.mine(4), recorder.read(), recorder.window(), before, perf_counter()


def test_a_step_on_a_device_is_recorded_in_the_order_of_the_program_on_the_hosts_scale() -> None:
    for program, step, window, before, after in run_on(Grid(pp=2), recorded, device="cuda"):
        assert [span.action for span in step.computes] == [a for a in program if a.op in COMPUTE]
        assert not step.messages
        every = sorted([*step.computes, *step.waits], key=lambda span: span.start)
        assert all(span.start <= span.end for span in every)
        assert all(one.end <= other.start + 1e-6 for one, other in pairwise(every))
        assert before < every[0].start and every[-1].end < after
        assert 0 < window.busy <= window.end - window.start
