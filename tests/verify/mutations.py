"""Faults that a proof must see: each breaks the running package in one place."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from parallel3d import engine
from parallel3d.comm.collectives import Pending, all_reduce
from parallel3d.comm.p2p import Channel
from parallel3d.engine import Engine
from parallel3d.optim import norm
from parallel3d.optim.norm import NormSlots
from parallel3d.pipeline.criterion import SumLoss
from parallel3d.placement import Replicate, Shard
from parallel3d.tensor import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear,
    loss,
    regions,
)
from parallel3d.topology import Grid, Topology
from parallel3d.verify import Case, Subject, parallel
from parallel3d.verify.trace import Setting, Trace
from parallel3d.zero import gradients, values
from parallel3d.zero.shards import Shards
from parallel3d.zero.ties import Ties

PP, DP, TP = Grid(pp=2), Grid(dp=2), Grid(tp=2)


class Mutation(NamedTuple):
    """What replaces ``owner.name``, the columns that must show it, the first parameter named.

    Of the model with tied weights if ``tied``.
    """

    owner: Any
    name: str
    replacement: Any
    columns: str
    parameter: str = "0.token.weight"
    grid: Grid = DP
    tied: bool = False


def traces(
    topology: Topology, subject: Subject, setting: Setting, mutations: Sequence[str]
) -> Iterator[Trace]:
    """Of the package as it is, then under each mutation."""
    cases = [Case(topology.grid)]
    yield from parallel.train(topology, subject, setting, cases)
    for name in mutations:
        owner, attribute, replacement, *_ = MUTATIONS[name]
        with patch.object(owner, attribute, replacement):
            yield from parallel.train(topology, subject, setting, cases)


def around(
    owner: Any, name: str, change: Callable[..., Any]
) -> tuple[Any, str, Callable[..., Any]]:
    """Replace a function by ``change``, which is given the original before the arguments."""
    original = getattr(owner, name)
    return owner, name, lambda *args, **kwargs: change(original, *args, **kwargs)


def not_sent(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def nothing_pending(x: Tensor, *_: Any, **__: Any) -> Pending:
    return Pending.done(x)


def own_part(_: Tensor, out: Tensor, *__: Any, **___: Any) -> Pending:
    return Pending.done(out)


def bias_on_every_rank(self: RowParallelLinear, x: Tensor) -> Tensor:
    assert self.bias is not None
    return linear._RowLinear.apply(x, self.weight, self) + self.axis.size * self.bias


def a_row_late_on_rank_1(forward: Any, self: VocabParallelEmbedding, ids: Tensor) -> Tensor:
    return forward(self, (ids + 1).remainder(self.num_embeddings) if self.axis.rank else ids)


def one_block(self: ColumnParallelLinear) -> dict[str, Shard]:
    return dict.fromkeys(("weight", "bias"), Shard(0, (self.out_features,)))


def doubled(finish: Any, self: Shards) -> None:
    finish(self)
    for flat in self.trained():
        flat.owned_grad.mul_(2)


def rounded(finish: Any, self: Shards) -> None:
    finish(self)
    for flat in self.trained():
        flat.grad.copy_(flat.grad.float())


def summed_over_tp_too(update: Any, self: Engine, items: Tensor) -> Any:
    for flat in self.parts.shards.trained():
        for held, start, stop in flat.slots:
            if isinstance(held.placement, Replicate):
                all_reduce(flat.grad[start:stop], self.topology.tp)
    return update(self, items)


def first_slice_only(squares: Any, *args: Any) -> None:
    squares(*args)
    if os.environ["RANK"] != "0":
        args[-1].zero_()


def another_on_each_rank(coefficient: Any, norm: float, max_norm: float) -> float:
    return coefficient(norm * (1 + int(os.environ["RANK"])), max_norm)


def a_bit_off(coefficient: Any, norm: float, max_norm: float) -> float:
    return math.nextafter(coefficient(norm, max_norm), 2.0)


def of_a_neighbour(begin: Any, self: SumLoss, targets: list[Any], scale: Any) -> None:
    *others, a, b = targets
    begin(self, [*others, b, a] if a.shape == b.shape else targets, scale)


def after_each_microbatch(
    after: Any, self: Shards, unit: int, microbatch: int, reduce: bool
) -> None:
    """Reduce a unit and wait for it: what the next microbatch adds comes behind it."""
    after(self, unit, microbatch, reduce=True)
    while self.gradients._moving:
        self.gradients._finish_oldest()


def twice(step: Any, self: torch.optim.Optimizer) -> None:
    step(self)
    step(self)


def own_use_only(self: Ties) -> None:
    for pending in self._moving.values():
        pending.wait()
    self.forget()


def in_fp32(send: Any, self: Channel, tensors: Sequence[Tensor]) -> None:
    send(self, [tensor.float().double() for tensor in tensors])


def gradients_as_zeros(send: Any, self: Channel, tensors: Sequence[Tensor]) -> None:
    zeros = self.purpose == "gradients"
    send(self, [torch.zeros_like(tensor) for tensor in tensors] if zeros else tensors)


ALL = "loss gradient norm sgd adamw"
MUTATIONS = {
    "a column layer's input gradient is not summed over tp": Mutation(
        linear, "start_all_reduce", nothing_pending, ALL, grid=TP
    ),
    "a row layer's output is not summed over tp": Mutation(
        linear, "all_reduce", not_sent, f"{ALL} copies", grid=TP
    ),
    "an embedding's rows are not summed over tp": Mutation(
        regions, "all_reduce", not_sent, f"{ALL} copies", grid=TP
    ),
    "the softmax sums over this rank's vocabulary": Mutation(
        loss, "all_reduce", not_sent, ALL, grid=TP
    ),
    "a bias is added on each tp rank": Mutation(
        RowParallelLinear, "forward", bias_on_every_rank, ALL, "1.attention.out.bias", grid=TP
    ),
    "the second vocabulary shard starts one too early": Mutation(
        *around(VocabParallelEmbedding, "forward", a_row_late_on_rank_1), ALL, grid=TP
    ),
    "q, k and v are cut as one block": Mutation(
        ColumnParallelLinear, "placements", one_block, ALL, grid=TP
    ),
    "gradients are reduced twice": Mutation(*around(Shards, "finish_reduce", doubled), ALL),
    "gradients are rounded to fp32": Mutation(*around(Shards, "finish_reduce", rounded), ALL),
    "gradients are those of this dp rank": Mutation(
        gradients, "start_reduce_scatter", own_part, ALL
    ),
    "replicated gradients are summed over tp too": Mutation(
        *around(parallel.Observed, "_update", summed_over_tp_too), ALL, "0.position.weight", grid=TP
    ),
    "gradients are reduced after each microbatch": Mutation(
        *around(Shards, "after_backward", after_each_microbatch), ALL, parameter=""
    ),
    "gradients are not zeroed": Mutation(
        Shards, "zero_gradients", lambda self: None, "norm sgd adamw"
    ),
    "the loss is divided by this rank's items": Mutation(
        engine, "start_all_reduce", nothing_pending, ALL
    ),
    "the loss is divided twice": Mutation(
        engine, "_inverse", lambda items: 1.0 / items.double() ** 2, ALL
    ),
    "targets are those of another microbatch": Mutation(
        *around(SumLoss, "begin", of_a_neighbour), ALL
    ),
    "the norm counts replicated parameters on every tp rank": Mutation(
        norm, "Shard", (Shard, Replicate), "loss norm sgd adamw", grid=TP
    ),
    "the norm is that of the first dp rank's shard": Mutation(
        *around(NormSlots, "squares", first_slice_only), "loss norm sgd adamw"
    ),
    "each rank clips by a norm of its own": Mutation(
        *around(engine, "clip_coefficient", another_on_each_rank),
        "loss norm sgd adamw copies",
        grid=TP,
    ),
    "clipping is a bit off": Mutation(*around(engine, "clip_coefficient", a_bit_off), ""),
    "updated parameters are not gathered": Mutation(
        values, "start_all_gather", own_part, "loss norm sgd adamw copies"
    ),
    "the optimizer steps twice": Mutation(*around(torch.optim.AdamW, "step", twice), "adamw"),
    "activations cross a border in fp32": Mutation(*around(Channel, "send", in_fp32), ALL, grid=PP),
    "uses of a tied weight on another rank are not added": Mutation(
        Ties, "add_up", own_use_only, f"{ALL} copies", grid=PP, tied=True
    ),
    "no gradient crosses a border": Mutation(
        *around(Channel, "send", gradients_as_zeros), ALL, grid=PP
    ),
}
