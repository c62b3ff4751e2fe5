"""The two sides of the pipeline benchmark on one rank: the engine, and torch's own schedules."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import pipelining

from models import llama
from parallel3d import Engine, Topology, vocab_parallel_cross_entropy
from parallel3d.pipeline.actions import COMPUTE, Action
from parallel3d.pipeline.schedules import build
from parallel3d.pipeline.simulate import Span

# Torch's schedule of the same order, and whether it takes one stage a rank or a list of them.
TORCHS: dict[str, Callable[..., Any]] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "looped-bfs": pipelining.ScheduleLoopedBFS,
    "zb-h1": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
SINGLE = ("gpipe", "1f1b")
MICRO = 2  # samples of a microbatch


class Work(NamedTuple):
    """What every side does in a step."""

    pp: int
    num_microbatches: int
    width: int
    num_layers: int
    seq_len: int

    @property
    def sizes(self) -> dict[str, int]:
        """The model's."""
        return {
            "vocab_size": 256,
            "width": self.width,
            "num_layers": self.num_layers,
            "num_heads": 8,
            "num_kv_heads": 8,
            "ffn_width": 3 * self.width,
            "max_seq_len": self.seq_len,
        }

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens ``[m * MICRO, seq_len]`` and targets of a step."""
        generator = torch.Generator().manual_seed(number)
        shape = (2, MICRO * self.num_microbatches, self.seq_len)
        x, target = torch.randint(256, shape, generator=generator)
        return x, target

    def starts(self, num_stages: int) -> list[int]:
        """The first unit of each stage: as many blocks in each, the embedding and the head more."""
        return [0, *(1 + s * self.num_layers // num_stages for s in range(1, num_stages))]


class Result(NamedTuple):
    """A step of one rank: seconds of the wall and of its CPU, the loss, and its computes.

    The loss is None where a side does not know it. Spans are in seconds of one clock for all ranks.
    """

    seconds: float
    cpu: float
    loss: float | None
    spans: list[Span]


class Timer:
    """Notes the computes of a step, as an observer of the interpreter."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._began = 0.0

    def waits(self, action: Action) -> None:
        """Nothing: what passes between two computes is idle."""

    def begins(self, action: Action) -> None:
        """A compute has its input."""
        self._began = time.monotonic()

    def ends(self, action: Action) -> None:
        """An action is done."""
        if action.op in COMPUTE:
            self.spans.append(Span(action, self._began, time.monotonic()))


class Ours:
    """The engine under a schedule."""

    def __init__(self, topology: Topology, work: Work, schedule: str, values: Any) -> None:
        self.work, self.timer = work, Timer()
        with torch.device("meta"):
            model = llama.build(topology, **work.sizes)
        num_stages = len(build(schedule, work.pp, 1).rank_of_stage)
        self.engine = Engine(
            model,
            topology,
            loss_fn=partial(vocab_parallel_cross_entropy, axis=topology.tp),
            optimizer=partial(torch.optim.AdamW, lr=3e-4, fused=True),
            schedule=schedule,
            num_microbatches=work.num_microbatches,
            partition=work.starts(num_stages)[1:],
            init=lambda name, tensor: tensor.copy_(values[name]),
        )
        self.engine.parts.interpreter.observers.append(self.timer)

    def step(self, number: int) -> tuple[float | None, list[Span]]:
        """Train on a batch."""
        self.timer.spans = []
        result = self.engine.train_step(*self.work.batch(number))
        return result.loss, self.timer.spans


class Torchs:
    """``torch.distributed.pipelining`` on the same stages, of plain torch.nn."""

    def __init__(self, topology: Topology, work: Work, schedule: str, values: Any) -> None:
        self.work = work
        home = build(schedule, work.pp, 1).rank_of_stage
        starts = [*work.starts(len(home)), work.num_layers + 2]
        model = llama.reference(**work.sizes)
        model.load_state_dict(values)
        mine = [stage for stage, rank in enumerate(home) if rank == topology.pp.rank]
        parts = [model[starts[stage] : starts[stage + 1]] for stage in mine]
        stages = [
            pipelining.PipelineStage(
                part, stage, len(home), torch.device("cpu"), group=topology.pp.group
            )
            for stage, part in zip(mine, parts, strict=True)
        ]
        self.is_first, self.is_last = 0 in mine, len(home) - 1 in mine
        self.schedule = TORCHS[schedule](
            stages[0] if schedule in SINGLE else stages,
            work.num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )
        self.optimizer = torch.optim.AdamW(
            [p for part in parts for p in part.parameters()], lr=3e-4, fused=True
        )

    def step(self, number: int) -> tuple[float | None, list[Span]]:
        """Train on a batch."""
        x, target = self.work.batch(number)
        losses: list[Tensor] = []
        ends = {"target": target, "losses": losses} if self.is_last else {}
        self.schedule.step(*([x] if self.is_first else []), return_outputs=False, **ends)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(loss.item() for loss in losses) if self.is_last else None, []

    def _loss(self, logits: Tensor, target: Tensor) -> Tensor:
        items = target.numel() * self.work.num_microbatches
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / items


SIDES: dict[str, Callable[..., Any]] = {"ours": Ours, "torch": Torchs}


def rank_main(pipe: Connection, rank: int, store: str, work: Work) -> None:
    """One rank: ``(side, schedule, step number)`` in, a ``Result`` or the text of an error out.

    First of all it answers the seconds of one message.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(work.pp), "LOCAL_RANK": str(rank)}
    os.environ["LOCAL_WORLD_SIZE"] = str(work.pp)
    torch.set_num_threads(1)
    with Topology.init(work.pp, 1, 1, init_method=store, device="cpu") as topology:
        torch.manual_seed(0)
        values = llama.reference(**work.sizes).state_dict()
        running: dict[tuple[str, str], Any] = {}
        pipe.send(message_seconds(topology, (MICRO, work.seq_len, work.width)))
        while (asked := pipe.recv()) is not None:
            side, schedule, number = asked
            try:
                if (side, schedule) not in running:
                    running[side, schedule] = SIDES[side](topology, work, schedule, values)
                began, used = time.perf_counter(), time.process_time()
                loss, spans = running[side, schedule].step(number)
                seconds, cpu = time.perf_counter() - began, time.process_time() - used
                pipe.send(Result(seconds, cpu, loss, spans))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])


def message_seconds(topology: Topology, shape: tuple[int, ...], repeats: int = 20) -> float:
    """Half the time to and fro between the first two ranks; 0 on the others."""
    if topology.pp.rank > 1 or topology.pp.size == 1:
        return 0.0
    tensor, times = torch.zeros(shape), []
    for _ in range(repeats):
        began = time.perf_counter()
        for sender in (0, 1):
            act = dist.send if topology.pp.rank == sender else dist.recv
            act(tensor, 1 - topology.pp.rank)
        times.append((time.perf_counter() - began) / 2)
    return statistics.median(times)
