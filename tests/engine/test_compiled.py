"""Compiled units against eager ones."""

from __future__ import annotations

import warnings
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from parallel3d import Engine
from parallel3d.pipeline.actions import Action, Op
from parallel3d.topology import Grid, Topology
from tests.engine.cases import Tensors, engine, error, train
from tests.world import run_on


class Waiting:
    """An observer that counts the weight gradients that wait after each I."""

    def __init__(self, of: Engine) -> None:
        self.stages, self.counts = of.parts.stages, list[int]()
        of.parts.interpreter.observers.append(self)

    def waits(self, action: Action) -> None:
        pass

    def begins(self, action: Action) -> None:
        pass

    def ends(self, action: Action) -> None:
        if action.op is Op.INPUT_GRAD:
            queues = self.stages[action.stage]._deferred.items()
            self.counts += [len(queue) for (k, _), queue in queues if k == action.microbatch]


def both_ways(
    topology: Topology, options: dict[str, Any]
) -> list[tuple[list[int], int, list[tuple[float, float]], Tensors]]:
    """Eager and compiled: what waited, the graphs made, losses and norms, and the weights."""
    # A backend that compiles in a moment; and torch warns of what its compiler does.
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")  # type: ignore[assignment,arg-type]
    warnings.filterwarnings("ignore")
    graphs = torch._dynamo.utils.counters["stats"]
    found = []
    for compiled in (False, True):
        of = engine(topology, compile=compiled, **options)
        waiting = Waiting(of)
        results = train(of, 2)
        found.append((waiting.counts, graphs["unique_graphs"], results, of.state_dict_whole()))
    return found


@pytest.mark.report("pytorch/pytorch#161904")
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Grid(pp=2), {"schedule": "zb-h1"}),
        (Grid(pp=2), {"schedule": "zbv", "recompute": "full"}),
        (Grid(pp=2, tp=2), {"schedule": "zb-h1"}),
        (Grid(tp=2), {"schedule": "1f1b"}),
    ],
    ids=str,
)
def test_compiled_units_give_the_numbers_of_eager_ones_and_put_off_as_much(
    layout: Grid, options: dict[str, Any]
) -> None:
    for rank, (eager, compiled) in enumerate(run_on(layout, both_ways, options=options)):
        splits = options["schedule"].startswith("zb")
        assert bool(sum(eager[0])) == splits and compiled[0] == eager[0]
        assert eager[1] == 0 and compiled[1] > 0, "nothing was compiled"
        assert np.allclose(compiled[2], eager[2], rtol=1e-9)
        if rank == 0:
            assert error(compiled[3], eager[3]) < 1e-9
