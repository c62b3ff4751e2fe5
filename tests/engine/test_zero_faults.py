"""Reported faults of sharding, each as the small case that shows it, under every stage of ZeRO."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Engine, Grid, Topology
from parallel3d.memory import memory
from tests.engine.cases import (
    ADAMW,
    WIDTH,
    Tensors,
    batch,
    engine,
    error,
    same,
    share,
    train,
    train_plainly,
)
from tests.world import run_on

ONCE: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 2, "zero_reduce": "last"},
    {"zero": 3, "zero_reduce": "last", "gather_budget": 0},
]
EACH: list[dict[str, Any]] = [{"zero": 2}, {"zero": 3}]
STAGES = ONCE + EACH


def same_in_classes(found: list[tuple[Any, Tensors]]) -> bool:
    """Whether runs of ``STAGES`` gave equal numbers and weights, those of each class."""
    return all(
        numbers == runs[0][0] and same(weights, runs[0][1])
        for runs in (found[: len(ONCE)], found[len(ONCE) :])
        for numbers, weights in runs
    )


class Token(nn.Module):
    """One weight, 0 at first; the loss of a valid item is its value times the target."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def valid_sum(output: Tensor, target: Tensor) -> Tensor:
    return (output * (target > 0)).sum()


def count_valid(target: Tensor) -> Tensor:
    return (target > 0).sum()


def tokens(topology: Topology, values: list[list[float]]) -> tuple[float, float]:
    """Loss, and weight after SGD at lr 1, of each dp rank's item losses; 0 is not valid."""
    mine = engine(
        topology,
        nn.Sequential(Token()),
        loss_fn=valid_sum,
        num_items=count_valid,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        num_microbatches=1,
    )
    x = torch.tensor(values[topology.dp.rank], dtype=torch.float64)
    loss = mine.train_step(x, x).loss
    mine.parts.shards.settle()
    return loss, mine.parts.units[0].module.weight.item()


@pytest.mark.report("huggingface/transformers#34242")
@pytest.mark.report("huggingface/transformers#37474")
@pytest.mark.parametrize(
    ("values", "loss"),
    [([[2.0, 2.0, 2.0, 0.0], [6.0, 0.0, 0.0, 0.0]], 3.0), ([[2.0, 4.0], [0.0, 0.0]], 3.0)],
)
def test_items_are_averaged_over_all_ranks_at_once(values: list[list[float]], loss: float) -> None:
    assert run_on(Grid(dp=2), tokens, values=values) == [(loss, -1.0)] * 2


def accumulated(topology: Topology) -> list[float]:
    """The update of one weight whose gradients in four microbatches are 1, 10, 100, 1000."""
    found = []
    for stage in STAGES:
        mine = engine(
            topology,
            nn.Sequential(nn.Linear(1, 1, bias=False)),
            loss_fn=lambda y, target: y.sum(),
            optimizer=partial(torch.optim.SGD, lr=1.0),
            init=lambda name, tensor: tensor.zero_(),
            **stage,
            num_microbatches=4,
        )
        x = torch.tensor([[1.0], [10.0], [100.0], [1000.0]], dtype=torch.float64)
        mine.train_step(x, x)
        mine.parts.shards.settle()
        found.append(-mine.parts.units[0].module.weight.item())
    return found


@pytest.mark.report("allenai/open-instruct#1498")
def test_every_microbatch_counts() -> None:
    assert run_on(Grid(dp=2), accumulated) == [[277.75] * len(STAGES)] * 2


class Branches(nn.Module):
    """A second layer that takes part where x's first element is positive only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return y + self.seldom(x) if x[0, 0] > 0 else y


def branching(topology: Topology) -> Any:
    found = []
    for stage in STAGES:
        model = nn.Sequential(Branches(), nn.Linear(WIDTH, WIDTH))
        for at, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(at))
        mine = engine(topology, model, num_microbatches=4, **stage)
        for step in range(3):
            x, target = batch(step, 16, torch.float64)
            # On rank 0 only, in its microbatches 0 and 2.
            x[:, 0] = -1.0
            x[[0, 4], 0] = 1.0
            mine.train_step(*share(topology, x, target))
        states = [s["step"].item() for s in mine.parts.optimizer.states()]
        assert set(states) == {3.0}
        found.append(([], mine.state_dict_whole()))
    assert same_in_classes(found)
    return found[0][1], found[-1][1]


@pytest.mark.report("deepspeedai/DeepSpeed#545")
def test_a_branch_used_by_some_microbatches_of_one_rank_counts_as_zero_elsewhere() -> None:
    (both, _) = run_on(Grid(dp=2), branching)
    model = nn.Sequential(Branches(), nn.Linear(WIDTH, WIDTH)).double()
    for at, parameter in enumerate(model.parameters()):
        value = torch.empty(parameter.shape)
        nn.init.normal_(value, generator=torch.Generator().manual_seed(at))
        parameter.data.copy_(value)
    optimizer = ADAMW(model.parameters())
    for step in range(3):
        x, target = batch(step, 16, torch.float64)
        x[:, 0] = -1.0
        x[[0, 4], 0] = 1.0
        optimizer.zero_grad(set_to_none=False)
        total = sum(
            nn.functional.mse_loss(model(a), b, reduction="sum")
            for a, b in zip(x.split(2), target.split(2), strict=True)
        )
        (total / target.numel()).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for weights in both:
        assert error(weights, model.state_dict()) < 1e-10
        # What never has a gradient is decayed, and no more.
        assert weights["0.never"].allclose(model[0].never.detach(), rtol=1e-12, atol=0)


class Few(nn.Module):
    """Three elements and one."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.one = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.narrow(1, 0, 3) * self.three + self.one


def few(topology: Topology, folder: Path, loads: bool) -> Any:
    found = []
    for at, stage in enumerate(STAGES):
        mine = engine(topology, nn.Sequential(Few()), **stage)
        if loads:
            mine.load(folder / str(at))
        for step in range(3):
            x, _ = share(topology, *batch(step + mine.step, dtype=torch.float64))
            mine.train_step(x, x[:, :3] * 2)
        if not loads:
            mine.save(folder / str(at))
            mine.train_step(x, x[:, :3] * 2)
        found.append(([], mine.state_dict_whole()))
    assert same_in_classes(found)
    return found[-1][1]


@pytest.mark.report("deepspeedai/DeepSpeed#129")
def test_fewer_elements_than_ranks_train_save_and_load_anywhere(tmp_path: Path) -> None:
    run_on(Grid(dp=4), few, folder=tmp_path, loads=False)
    two, one = (run_on(Grid(dp=dp), few, folder=tmp_path, loads=True)[0] for dp in (2, 1))
    assert error(two, one) < 1e-12
    assert not two["0.three"].eq(1).any() and two["0.one"] != 1


def grouped(topology: Topology) -> Any:
    """Interleaved groups of two rates, and decay for matrices only, on zero gradients."""
    found = []
    for stage in STAGES:
        mine = engine(
            topology,
            loss_fn=lambda y, target: (y * 0).sum(),
            optimizer=partial(torch.optim.AdamW, weight_decay=0.1),
            param_groups=lambda name, p: {
                "lr": 0.1 if int(name[0]) % 2 else 0.001,
                "weight_decay": 0.1 if p.ndim > 1 else 0.0,
            },
            init=lambda name, tensor: tensor.fill_(1.0),
            **stage,
        )
        train(mine, 1)
        found.append(mine.state_dict_whole())
    assert all(same(each, found[0]) for each in found)
    return found[0]


@pytest.mark.report("deepspeedai/DeepSpeed#6873")
@pytest.mark.report("ServiceNow/Fast-LLM#545")
@pytest.mark.parametrize("layout", ["1x1x1", "1x2x2", "2x2x1"])
def test_groups_keep_their_rates_and_their_decay(layout: str) -> None:
    weights = run_on(Grid.parse(layout), grouped)[0]
    for name, value in weights.items():
        rate = 0.1 if int(name[0]) % 2 else 0.001
        decayed = 1 - rate * 0.1 if value.ndim > 1 else 1.0
        assert torch.equal(value, torch.full_like(value, decayed)), name


class Ones(nn.Module):
    """A weight of four elements whose gradient is (1, 2, 2, 4)."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        sizes = [1] * 4 if split else [4]
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cat(list(self.weights))


def clipped(topology: Topology, split: bool, stage: dict[str, Any]) -> Any:
    mine = engine(
        topology,
        nn.Sequential(Ones(split)),
        loss_fn=lambda y, target: y.sum(),
        num_items=lambda target: len(target),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        max_grad_norm=1.0,
        num_microbatches=1,
        **stage,
    )
    x = torch.tensor([[1.0, 2.0, 2.0, 4.0]], dtype=torch.float64)
    norm = mine.train_step(x, x).grad_norm
    mine.parts.shards.settle()
    return norm, torch.cat([v.view(-1) for v in mine.parts.units[0].module.parameters()]).tolist()


@pytest.mark.report("pytorch/pytorch#170862")
@pytest.mark.report("ByteDance-Seed/VeOmni#184")
@pytest.mark.parametrize(
    "stage", [*STAGES, *({"zero": zero, "shard_size": 2} for zero in (1, 2, 3))], ids=str
)
@pytest.mark.parametrize("split", [True, False])
def test_every_rank_clips_by_the_norm_of_the_whole(split: bool, stage: dict[str, Any]) -> None:
    for norm, weights in run_on(Grid(dp=4), clipped, split=split, stage=stage):
        assert norm == 5.0
        assert weights == pytest.approx([-0.2, -0.4, -0.4, -0.8], rel=1e-6)


def tied(topology: Topology, far: bool) -> Any:
    """A linear layer used by two units (far), or twice inside one."""
    found = []
    for stage in STAGES:
        shared, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for at, parameter in enumerate([*shared.parameters(), *other.parameters()]):
            nn.init.normal_(parameter, 0, 0.3, torch.Generator().manual_seed(at))
        layers = (shared, nn.Tanh(), other, nn.Tanh(), shared)
        model = nn.Sequential(*layers) if far else nn.Sequential(nn.Sequential(*layers))
        mine = engine(topology, model, **stage)
        names = set(mine.parts.facts)
        found.append((train(mine, 10), mine.state_dict_whole()))
        assert not topology.rank or not found[-1][1]
        if not topology.rank:
            assert names == set(found[-1][1])
    assert same_in_classes(found)
    return found[0], found[-1]


@pytest.mark.report("deepspeedai/DeepSpeed#966")
@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize("layout", ["1x1x1", "1x2x1"])
def test_a_layer_used_twice_equals_plain_pytorch(layout: str, far: bool) -> None:
    both = run_on(Grid.parse(layout), tied, far=far)[0]
    shared, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    for at, parameter in enumerate([*shared.parameters(), *other.parameters()]):
        nn.init.normal_(parameter, 0, 0.3, torch.Generator().manual_seed(at))
    model = nn.Sequential(shared, nn.Tanh(), other, nn.Tanh(), shared).double()
    expected = train_plainly(model, 10)
    prefix = "" if far else "0."
    for losses, weights in both:
        torch.testing.assert_close(losses, expected, rtol=1e-11, atol=0)
        for use in ("0", "4"):
            assert weights[f"{prefix}{use}.weight"].allclose(shared.weight.detach(), rtol=1e-10)


def frozen_memory(topology: Topology, zero: int) -> Any:
    """Bytes by kind in bf16, of a model of which a thousandth is trained."""
    big, small = nn.Linear(128, 128), nn.Linear(128, 1)
    big.requires_grad_(False)
    mine: Engine = engine(
        topology,
        nn.Sequential(big, small),
        precision="bf16",
        optimizer=torch.optim.AdamW,
        zero=zero,
    )
    x = torch.ones(2, 128)
    mine.train_step(x, x[:, :1])
    grads = [parameter.grad for parameter in big.parameters()]
    return memory(mine.parts), grads


@pytest.mark.report("deepspeedai/DeepSpeed#8029")
@pytest.mark.report("deepspeedai/DeepSpeed#2615")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_frozen_weights_have_no_master_no_gradient_and_no_moments(zero: int) -> None:
    found = run_on(Grid(dp=2), frozen_memory, zero=zero)
    trained, padded, frozen = 129, 256, 128 * 129
    masters_and_moments = sum(kept.optimizer for kept, _ in found)
    # Two step counts of 4 bytes beside masters and two moments.
    assert trained * 12 <= masters_and_moments <= padded * 12 + 2 * 4
    for kept, grads in found:
        # At stage 3 a rank has half of the buffers, of which the frozen one needs no padding.
        assert kept.parameters == (frozen + padded) * 2 // (2 if zero == 3 else 1)
        assert kept.gradients == padded * 4 // (2 if zero >= 2 else 1)
        assert grads == [None, None]
