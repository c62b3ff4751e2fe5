"""Trials: a model trained by the engine under a layout, and by plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parallel3d import Engine
from parallel3d.engine import StepResult
from parallel3d.topology import Grid, Topology
from tests.world import run_on

Weights = dict[str, Tensor]
SGD = partial(torch.optim.SGD, lr=1.0)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


@dataclass(frozen=True)
class Trial:
    """A model and what it is trained on.

    Args:
        build: the model, in fp64; seeded by the caller.
        steps: for each step a global batch ``(x, target)``, or a list of microbatches.
        loss_fn: a sum.
        num_items: of a target; by default floats, or integers that are not -100.
        optimizer: SGD at a rate of 1 shows gradients as differences of weights.
        options: other arguments of the engine.
    """

    build: Callable[[], nn.Sequential]
    steps: Sequence[Any]
    loss_fn: Callable[[Any, Any], Tensor] = squared
    num_items: Callable[[Any], int] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    options: dict[str, Any] = field(default_factory=dict)


class Trace(NamedTuple):
    """What each step gave, and the whole weights before the first and after each."""

    results: list[StepResult]
    weights: list[Weights]


def model_of(trial: Trial) -> nn.Sequential:
    torch.manual_seed(11)
    return trial.build().double()


def engine_of(topology: Topology, trial: Trial) -> Engine:
    return Engine(
        model_of(trial),
        topology,
        loss_fn=trial.loss_fn,
        optimizer=trial.optimizer,
        num_items=trial.num_items,
        **{"precision": "fp64", **trial.options},
    )


def share(tree: Any, topology: Topology) -> Any:
    """This dp rank's part of a global batch."""
    size, rank = topology.dp.size, topology.dp.rank
    return tree_map_only(Tensor, lambda tensor: torch.tensor_split(tensor, size)[rank], tree)


def follow(engine: Engine, steps: Sequence[Any]) -> Trace:
    """Train on each batch. Weights are on rank 0."""
    results, weights = [], [engine.state_dict_whole()]
    for step in steps:
        mine = share(step, engine.topology)
        results.append(engine.train_step(*([mine] if isinstance(mine, list) else mine)))
        weights.append(engine.state_dict_whole())
    return Trace(results, weights)


def on_rank(topology: Topology, trials: Sequence[Trial]) -> list[Trace]:
    traces = []
    for number, trial in enumerate(trials):
        try:
            traces.append(follow(engine_of(topology, trial), trial.steps))
        except Exception as error:
            error.add_note(f"in trial {number}, of {trial.build.__name__}")
            raise
    return traces


def by_engine(grid: Grid, trials: Sequence[Trial]) -> list[Trace]:
    """Every trial under a layout, in one world. What the steps gave is the same on all ranks."""
    ranks = run_on(grid, on_rank, trials=trials)
    for traces in ranks[1:]:
        for trace, first in zip(traces, ranks[0], strict=True):
            assert repr(trace.results) == repr(first.results), "ranks were told different numbers"
    return ranks[0]


def named(grid: Grid, trials: dict[str, Trial]) -> dict[str, Trace]:
    """As ``by_engine``, by name."""
    return dict(zip(trials, by_engine(grid, list(trials.values())), strict=True))


def by_plain_torch(trial: Trial) -> Trace:
    """One process, one graph: the sum over all microbatches, divided by all items."""
    model = model_of(trial).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = trial.optimizer(trained) if trained else None
    results, weights = [], [snapshot(model)]
    for step in trial.steps:
        pairs = step if isinstance(step, list) else [step]
        items = sum((trial.num_items or items_of)(target) for _, target in pairs)
        total = sum(trial.loss_fn(model(x), target) for x, target in pairs)
        loss = total / items if items else total * 0
        model.zero_grad()
        if loss.requires_grad:
            loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in trained if p.grad is not None))
        if optimizer and items:
            optimizer.step()
        results.append(StepResult(loss.item(), norm, 0.0, not items, items))
        weights.append(snapshot(model))
    return Trace(results, weights)


def items_of(target: Tensor) -> int:
    return target.numel() if target.is_floating_point() else int((target != -100).sum())


def snapshot(model: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_equal_to(reference: Trace, trace: Trace, tolerance: float = 1e-11) -> None:
    """Losses, norms and updates of every step; an update by its largest element."""
    for at, (got, true) in enumerate(zip(trace.results, reference.results, strict=True)):
        assert math.isclose(got.loss, true.loss, rel_tol=tolerance, abs_tol=tolerance), at
        assert math.isclose(got.grad_norm, true.grad_norm, rel_tol=tolerance, abs_tol=1e-14), at
        assert (got.num_items, got.skipped) == (true.num_items, true.skipped), at
    for got, true in zip(trace.weights, reference.weights, strict=True):
        assert got.keys() == true.keys()
    for name, first in reference.weights[0].items():
        assert torch.equal(trace.weights[0][name], first), name
    for at in range(1, len(reference.weights)):
        for name, true in reference.weights[at].items():
            update = (true - reference.weights[at - 1][name]).abs().max()
            error = (trace.weights[at][name] - true).abs().max()
            assert error <= tolerance * update + 1e-15, (name, at, float(error), float(update))
