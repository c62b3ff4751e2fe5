"""The side under proof: the engine under a layout, read back as whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..assemble.parts import Parts
from ..assemble.state import whole_gradients
from ..comm.collectives import all_gather_objects
from ..engine import Engine, StepResult
from ..placement import Replicate
from ..topology import Axis, Topology
from .cases import Case
from .subject import Subject
from .trace import OPTIMIZERS, Run, Setting, Tensors, Trace

BUDGET = 2**18  # bytes: too few for a model, so that ZeRO 3 gathers units again


class Observed(Engine):
    """An engine that keeps its first gradients, whole, as they are before clipping."""

    gradients: Tensors | None = None

    def _update(self, items: Tensor) -> StepResult:
        if self.gradients is None:
            self.gradients = whole_gradients(self.parts)
        return super()._update(items)


def initial_values(topology: Topology, subject: Subject, setting: Setting) -> Tensors:
    """What training starts from."""
    return _engine(
        topology, subject, setting, Case(topology.grid), OPTIMIZERS["sgd"]
    ).state_dict_whole()


def train(
    topology: Topology, subject: Subject, setting: Setting, cases: Sequence[Case]
) -> Iterator[Trace]:
    """Each case's trace, on rank 0; tensors elsewhere are missing."""
    for case in cases:
        yield {
            name: _run(topology, subject, setting, case, make) for name, make in OPTIMIZERS.items()
        }


def _run(
    topology: Topology,
    subject: Subject,
    setting: Setting,
    case: Case,
    make: Callable[[Any], torch.optim.Optimizer],
) -> Run:
    engine = _engine(topology, subject, setting, case, make)
    batches = (subject.batch(step) for step in range(setting.steps))
    results = [engine.train_step(*_share(batch, topology.dp)) for batch in batches]
    losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
    weights = engine.state_dict_whole()
    return Run(losses, norms, engine.gradients or {}, weights, _unequal_copies(engine.parts))


def _engine(
    topology: Topology,
    subject: Subject,
    setting: Setting,
    case: Case,
    make: Callable[[Any], torch.optim.Optimizer],
) -> Observed:
    torch.manual_seed(setting.seed)  # for a model that is built on a real device
    measured = case.schedule == "auto"
    return Observed(
        subject.build(topology),
        topology,
        loss_fn=subject.loss_under(topology),
        optimizer=make,
        num_items=subject.num_items,
        schedule=case.schedule,
        num_microbatches=setting.num_microbatches,
        num_chunks=case.num_chunks,
        partition="measure" if measured else setting.partition,
        sample=_sample(subject, setting, topology.dp) if measured else None,
        zero=case.zero,
        zero_reduce=case.reduce,
        gather_budget=BUDGET,
        precision="fp64",
        recompute=case.recompute,
        max_grad_norm=setting.max_grad_norm,
        seed=setting.seed,
    )


def _share(batch: Any, dp: Axis) -> tuple[Any, ...]:
    """This dp rank's part of a whole batch, or of ready microbatches."""
    if isinstance(batch, list):
        count, rest = divmod(len(batch), dp.size)
        if rest:
            raise ValueError(
                f"{len(batch)} ready microbatches cannot be dealt to {dp.size} dp ranks, which "
                f"run equally many: give a multiple"
            )
        return (batch[dp.rank * count : (dp.rank + 1) * count],)
    return tree_map_only(Tensor, lambda t: torch.tensor_split(t, dp.size)[dp.rank], batch)


def _sample(subject: Subject, setting: Setting, dp: Axis) -> Any:
    """The first microbatch of this dp rank."""
    share = _share(subject.batch(0), dp)
    if len(share) == 1:
        return share[0][0]
    count = setting.num_microbatches
    return tree_map_only(Tensor, lambda t: torch.tensor_split(t, count)[0], share)


def _unequal_copies(parts: Parts) -> list[str]:
    """Parameters whose values differ between ranks that should hold the same.

    Those are ranks of a dp axis, of tp where it is replicated, and of pp where it is tied.
    """
    mine = {}
    parts.shards.settle()
    for flat in parts.shards.trained():
        for held, _, _ in flat.slots:
            place = 0 if isinstance(held.placement, Replicate) else parts.topology.tp.rank
            data = held.parameter.detach().clone().cpu().contiguous().numpy()
            mine[parts.facts[held.name].owner, place] = blake2b(data.tobytes()).digest()
    seen: dict[tuple[str, int], set[bytes]] = {}
    for digests in all_gather_objects(mine, parts.topology.world):
        for key, digest in digests.items():
            seen.setdefault(key, set()).add(digest)
    return sorted({name for (name, _), digests in seen.items() if len(digests) > 1})
