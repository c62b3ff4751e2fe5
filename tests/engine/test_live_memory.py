"""What ranks keep during a step, counted from the storages that live, against the program on paper.

Every first step runs without receives that are posted early, so nothing waits in a buffer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from parallel3d import Engine
from parallel3d.pipeline.actions import COMPUTE, Action, Op, Program
from parallel3d.pipeline.simulate import simulate
from parallel3d.topology import Grid, Topology
from tests.engine.cases import WIDTH, blocks, engine
from tests.live import Live
from tests.world import run_on

ROWS = 5
LAYERS = ROWS * 2 * (8 + 12) * 8  # bytes of what goes into a block's two layers, and of gradients
PRODUCTS = ROWS * (12 + 8) * 8  # bytes of what the two layers give
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min")


class Kept(NamedTuple):
    """After one compute of a rank.

    ``count`` is of microbatches between their F and the end of their backward, each stage's for
    itself; ``bytes`` are kept for them; ``outputs`` are the bytes of what waits for its SEND or for
    the next stage; ``sent`` is the most tensors that a channel still holds.
    """

    action: Action
    count: int
    bytes: int
    outputs: int
    sent: int


class Watch:
    """An observer of an interpreter that looks at what lives after every compute."""

    def __init__(self, of: Engine) -> None:
        self.parts = of.parts
        self.live, self.kept = Live(), list[Kept]()
        self.parts.interpreter.observers.append(self)
        self._run, self.parts.interpreter.run = self.parts.interpreter.run, self.run  # type: ignore[method-assign]

    def run(self, actions: list[Action], step: Any) -> None:
        self.step = step
        self.kept.clear()
        with self.live:
            self._run(actions, step)
            left = self.live.bytes([self.parts.criterion.total])
        assert left == 0, "something is kept after the program"

    def waits(self, action: Action) -> None:
        pass

    def begins(self, action: Action) -> None:
        pass

    def ends(self, action: Action) -> None:
        if action.op not in COMPUTE:
            return
        stages = self.parts.stages.values()
        waiting = {(stage.index, k) for stage in stages for k, _ in stage._deferred}
        count = sum(stage.in_flight for stage in stages) + len(waiting)
        borders = self.parts.interpreter.borders.values()
        channels = [end for border in borders for end in (border.activations, border.gradients)]
        sent = [[data for _, data in end._sent] for end in channels]
        posted = [[c.cell_contents for c in w.__closure__] for w in self.step.posted.values()]
        handed: dict[str, list[Any]] = {"forward": [], "backward": []}
        for (way, *_), value in self.step.handed.items():
            handed[way].append(value)
        others = [sent, posted, handed["backward"], self.parts.criterion.total]
        own = self.live.bytes([*others, handed["forward"]])
        outputs = self.live.bytes(others) - own
        self.kept.append(Kept(action, count, own, outputs, max(map(len, sent))))


class Found(NamedTuple):
    program: Program
    alone: list[Kept]
    kept: list[Kept]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    x = torch.ones(count, ROWS, WIDTH, dtype=torch.float64)
    return [(each, each) for each in x]


def look(topology: Topology, cases: list[tuple[str, str]], count: int) -> list[Found]:
    """Of each schedule and way to recompute: a step of one microbatch, and one of ``count``."""
    found = []
    for schedule, recompute in cases:
        units = 2 * topology.pp.size
        both = []
        for m in (1, count):
            of = engine(
                topology, blocks(topology, units), schedule=schedule, recompute=recompute, zero=0
            )
            watch = Watch(of)
            of.train_step(batches(m))
            both.append(list(watch.kept))
        found.append(Found(of.parts.programs.whole(count, ahead=False), *both))
    return found


def costs(found: list[Found], num_stages: int) -> dict[str, list[float]]:
    """Bytes that each stage keeps of one microbatch, from its F and from its I."""
    sizes: dict[str, list[float]] = {"saved": [0.0] * num_stages, "deferred": [0.0] * num_stages}
    for rank in found:
        before = 0
        held: dict[int, float] = {}
        for (stage, op, _), _, now, *_ in rank.alone:
            if op is Op.FORWARD:
                sizes["saved"][stage] = held[stage] = now - before
            elif op is Op.INPUT_GRAD:
                sizes["deferred"][stage] = now - before + held[stage]
            before = now
    return sizes


CASES = [
    *((name, "none") for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")),
    *((name, "full") for name in ("1f1b", "zbv")),
    *((name, "selective") for name in ("1f1b", "zb-h1")),
]


@pytest.mark.report("pytorch/pytorch#128910")
@pytest.mark.report("marin-community/marin#6532")
@pytest.mark.report("PaddlePaddle/Paddle#34483")
@pytest.mark.parametrize(("pp", "count"), [(2, 5), (4, 9)])
def test_a_rank_keeps_what_its_program_keeps_on_paper(pp: int, count: int) -> None:
    ranks = run_on(Grid(pp=pp), look, cases=CASES, count=count)
    message = ROWS * WIDTH * 8
    for at, (schedule, recompute) in enumerate(CASES):
        found = [rank[at] for rank in ranks]
        program = found[0].program
        num_chunks = 2 if schedule in ("interleaved", "zbv") else 1
        sizes = costs(found, pp * num_chunks)
        units = 2 // num_chunks
        for size in sizes["deferred"]:
            assert size == (units * LAYERS if schedule.startswith("zb") else 0)
        if recompute != "none":
            products = {"full": 0, "selective": PRODUCTS}[recompute]
            first, *inner, _ = [size - units * products for size in sizes["saved"]]
            assert first == (units - 1) * message, "the model's input is the caller's"
            assert inner == [units * message] * len(inner), "the inputs of its units"
        paper = simulate(program, **sizes)
        outputs = simulate(program, **sizes, output=[message] * pp * num_chunks)
        for rank, (_, _, kept) in enumerate(found):
            where = schedule, recompute, rank
            assert max(each.count for each in kept) == paper.peaks[rank] * num_chunks, where
            assert max(each.bytes for each in kept) == paper.peak_bytes[rank], where
            most = max(each.bytes + each.outputs for each in kept)
            assert most <= outputs.peak_bytes[rank], where
            assert max(each.sent for each in kept) <= 1, "a message goes before the next one"
