"""The sides of the benchmark of ZeRO on one rank: the engine's stages, and what torch offers."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from models import llama
from parallel3d import Engine, Topology, vocab_parallel_cross_entropy
from parallel3d.comm.ledger import Event
from tools.bench.layouts import resident
from tools.bench.peak import PeakBytes
from tools.bench.plain import HEADS, MICRO, VOCAB, Reference, Size, batch

WARMUP = 2  # steps, in which all sides must tell the same losses
EVERYTHING = 2**40  # bytes: whatever is gathered stays until the update
STAGES: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"zero": 0},
    "ZeRO-1": {"zero": 1},
    "ZeRO-2 each": {"zero": 2, "zero_reduce": "each"},
    "ZeRO-2 last": {"zero": 2, "zero_reduce": "last"},
    "ZeRO-3 each": {"zero": 3, "zero_reduce": "each", "gather_budget": EVERYTHING},
    "ZeRO-3 last": {"zero": 3, "zero_reduce": "last", "gather_budget": EVERYTHING},
}
PEERS = ("DDP", "ZeroRedundancyOptimizer", "FSDP2 reshard", "FSDP2 keep", "DeepSpeed")
ADAMW: dict[str, Any] = {"lr": 3e-4, "fused": True}


class AbsentError(RuntimeError):
    """A side that cannot be run here; why."""


class Result(NamedTuple):
    """A step of one rank: seconds of the wall and of its CPU, and the loss of its share.

    ``sent`` is what the ledger has on dp, 0 for a peer. ``peak`` and ``overlap`` are counted where
    they were asked for: of gathers and reductions, how many had a unit's computation between their
    issue and the wait, and how many there were.
    """

    seconds: float
    cpu: float
    loss: float
    sent: int = 0
    peak: int = 0
    overlap: tuple[int, int] = (0, 0)


class Ours:
    """The engine at one stage."""

    def __init__(self, topology: Topology, size: Size, stage: str) -> None:
        self.topology, self.size = topology, size
        values = {name: value.clone() for name, value in Reference(size).model.state_dict().items()}
        with torch.device("meta"):
            model = llama.build(
                topology,
                vocab_size=VOCAB,
                width=size.width,
                num_layers=size.num_layers,
                num_heads=HEADS,
                num_kv_heads=HEADS,
                ffn_width=size.ffn_width,
                max_seq_len=size.seq_len,
            )
        self.engine = Engine(
            model,
            topology,
            loss_fn=partial(vocab_parallel_cross_entropy, axis=topology.tp),
            optimizer=partial(torch.optim.AdamW, **ADAMW),
            num_microbatches=size.batch // topology.dp.size // MICRO,
            max_grad_norm=1.0,
            init=lambda name, tensor: tensor.copy_(values[plain_name(name, size)]),
            **STAGES[stage],
        )

    def step(self, number: int) -> float:
        """Train on a batch."""
        share = [t.chunk(self.topology.dp.size)[self.topology.dp.rank] for t in whole(self, number)]
        self.engine.parts.ledger.reset()
        return self.engine.train_step(*share).loss

    def sent(self) -> int:
        """Bytes of the last step."""
        return self.engine.parts.ledger.bytes()["dp"]

    def resident(self) -> list[Tensor]:
        """What lives between two steps."""
        return resident(self.engine)


def whole(side: Any, number: int) -> tuple[Tensor, Tensor]:
    """The batch of a step over all ranks."""
    return batch(number, side.size)


def plain_name(name: str, size: Size) -> str:
    """Of a parameter in ``plain.Reference``, which has the same ones."""
    name = re.sub(r"\.(token|attention|mlp)\.", ".", name)
    last = size.num_layers + 1
    return {
        f"{last}.norm.weight": f"{last}.weight",
        f"{last}.logits.weight": f"{last + 1}.weight",
    }.get(name, name)


class Peer:
    """Plain units under one of torch's own ways, reduced once a step."""

    def __init__(self, topology: Topology, size: Size, name: str) -> None:
        self.topology, self.size = topology, size
        model: Any = Reference(size).model
        self.sharded = name.startswith("FSDP2")
        if self.sharded:
            mesh = DeviceMesh.from_group(topology.dp.group, "cpu")
            reshard = name == "FSDP2 reshard"
            for unit in model[1:-2]:
                fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
            self.model = fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        else:
            self.model = DistributedDataParallel(
                model, process_group=topology.dp.group, gradient_as_bucket_view=True
            )
        parameters = list(self.model.parameters())
        self.optimizer: Any = (
            ZeroRedundancyOptimizer(
                parameters, torch.optim.AdamW, process_group=topology.dp.group, **ADAMW
            )
            if name == "ZeroRedundancyOptimizer"
            else torch.optim.AdamW(parameters, **ADAMW)
        )

    def step(self, number: int) -> float:
        """Train on a batch; gradients travel with the last microbatch."""
        dp = self.topology.dp
        x, target = (part.chunk(dp.size)[dp.rank] for part in whole(self, number))
        total = torch.zeros(())
        parts = list(zip(x.split(MICRO), target.split(MICRO), strict=True))
        for at, (part, wanted) in enumerate(parts):
            with self._reducing(at == len(parts) - 1):
                loss = summed(self.model(part), wanted) / target.numel()
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()

    def _reducing(self, last: bool) -> AbstractContextManager[None]:
        if self.sharded:
            self.model.set_requires_gradient_sync(last)
            return nullcontext()
        return nullcontext() if last else self.model.no_sync()

    def resident(self) -> list[Tensor]:
        """What lives between two steps."""
        inner = getattr(self.optimizer, "optim", self.optimizer)
        states = [value for state in inner.state.values() for value in state.values()]
        parameters = list(self.model.parameters())
        grads = [parameter.grad for parameter in parameters]
        return [tensor for tensor in [*parameters, *grads, *states] if isinstance(tensor, Tensor)]


class DeepSpeed:
    """Its ZeRO-1, where it is installed."""

    def __init__(self, topology: Topology, size: Size, name: str) -> None:
        if find_spec("deepspeed") is None:
            raise AbsentError("not installed")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed

        self.topology, self.size = topology, size
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        config = {
            "train_batch_size": size.batch,
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "AdamW", "params": {"lr": ADAMW["lr"], "torch_adam": True}},
        }
        model = Reference(size).model
        self.model, *_ = deepspeed.initialize(
            model=model, config=config, model_parameters=model.parameters()
        )

    def step(self, number: int) -> float:
        """Train on a batch."""
        dp = self.topology.dp
        x, target = (part.chunk(dp.size)[dp.rank] for part in whole(self, number))
        total = 0.0
        for part, wanted in zip(x.split(MICRO), target.split(MICRO), strict=True):
            loss = summed(self.model(part), wanted) / wanted.numel()
            self.model.backward(loss)
            self.model.step()
            total += loss.item() * wanted.numel() / target.numel()
        return total

    def resident(self) -> list[Tensor]:
        """What lives between two steps, as far as it can be seen."""
        inner = self.model.optimizer.optimizer
        states = [value for state in inner.state.values() for value in state.values()]
        masters = [parameter for group in inner.param_groups for parameter in group["params"]]
        tensors = [*self.model.parameters(), *masters, *states]
        return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def summed(logits: Tensor, wanted: Tensor) -> Tensor:
    """The loss of a microbatch."""
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")


def make(topology: Topology, size: Size, name: str) -> Any:
    """A side by its name."""
    kind: Callable[..., Any] = Ours if name in STAGES else Peer
    return (DeepSpeed if name == "DeepSpeed" else kind)(topology, size, name)


def rank_main(pipe: Connection, rank: int, ranks: int, store: str, size: Size) -> None:
    """One rank: ``(side, what, step number)`` in, a ``Result`` or the text of an error out."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    with Topology.init(1, ranks, 1, init_method=store, device="cpu") as topology:
        sides: dict[str, Any] = {}
        while (asked := pipe.recv()) is not None:
            name, what, number = asked
            try:
                if name not in sides:
                    sides[name] = make(topology, size, name)
                pipe.send(WHAT[what](sides[name], number))
            except AbsentError as absent:
                pipe.send(str(absent))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])


def timed(side: Any, number: int) -> Result:
    """Two steps on one batch, the second timed; CPU seconds and the loss are of both and the first.

    In the first two numbers, which are compared, there is one step.
    """
    used, loss = time.process_time(), side.step(number)
    began = time.perf_counter()
    if number >= WARMUP:
        side.step(number)
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    return Result(seconds, cpu, loss, side.sent() if isinstance(side, Ours) else 0)


def counted(side: Any, number: int) -> Result:
    """A step whose tensors are counted."""
    with PeakBytes(side.resident()) as peak:
        loss = side.step(number)
    return Result(0.0, 0.0, loss, peak=peak.peak)


def traced(side: Any, number: int) -> Result:
    """Two steps of ours: what is issued at the end of one is waited for in the next."""
    if not isinstance(side, Ours):
        return Result(0.0, 0.0, 0.0)
    trace = Trace(side.engine)
    loss = 0.0
    for at in range(2):
        loss = side.step(number + at)
    return Result(0.0, 0.0, loss, overlap=trace.close())


class Trace:
    """Of an engine's steps when units compute, and when what is issued and waited for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: list[tuple[str, str]] = []
        engine.topology.dp.observers.append(self._hear)
        shards: Any = engine.parts.shards
        for name in ("before_forward", "before_backward", "before_weight_grad"):
            setattr(shards, name, self._then_computes(getattr(shards, name)))

    def close(self) -> tuple[int, int]:
        """Stop; of all gathers and reductions that were waited for, how many were overlapped."""
        self.engine.topology.dp.observers.remove(self._hear)
        shards: Any = self.engine.parts.shards
        for name in ("before_forward", "before_backward", "before_weight_grad"):
            delattr(shards, name)
        return overlapped(self.seen)

    def _hear(self, event: Event) -> None:
        if event.tag.startswith("unit "):
            self.seen.append((event.phase, f"{event.kind} {event.tag}"))

    def _then_computes(self, before: Callable[..., None]) -> Callable[..., None]:
        def both(unit: int, *given: int) -> None:
            before(unit, *given)
            self.seen.append(("compute", ""))

        return both


def overlapped(seen: list[tuple[str, str]]) -> tuple[int, int]:
    """Of what was issued and waited for: how much had a computation between, and how much it was.

    >>> overlapped([("issue", "a"), ("compute", ""), ("block", "a"), ("wait", "a"), ("issue", "b")])
    (1, 1)
    """
    computes = 0
    issued: dict[str, list[int]] = {}
    over = total = 0
    for phase, what in seen:
        if phase == "compute":
            computes += 1
        elif phase == "issue":
            issued.setdefault(what, []).append(computes)
        elif phase == "block" and issued.get(what):
            total += 1
            over += computes > issued[what].pop(0)
    return over, total


WHAT: Mapping[str, Callable[[Any, int], Result]] = {
    "time": timed,
    "count": counted,
    "trace": traced,
}
