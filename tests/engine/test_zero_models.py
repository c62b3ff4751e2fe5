"""ZeRO 2 and 3 of models whose units use parameters in every way, beside plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Engine, Grid, Topology
from parallel3d.memory import memory
from tests.engine.cases import BATCH, WIDTH, error, same
from tests.engine.trials import SGD, Trace, Trial, by_plain_torch, named
from tests.world import run_on

STEPS = 3
STAGES: list[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 2, "zero_reduce": "last"},
    {"zero": 3, "zero_reduce": "last", "gather_budget": 0},
    {"zero": 3, "zero_reduce": "last"},
    {"zero": 2, "zero_reduce": "each"},
    {"zero": 3, "zero_reduce": "each", "gather_budget": 1500},
    {"zero": 3, "zero_reduce": "each", "recompute": "full", "gather_budget": 0},
]


class Twice(nn.Module):
    """One layer used two times in a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Adapted(nn.Module):
    """A frozen layer, and a trained detour of low rank (LoRA, arXiv 2106.09685)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = (nn.Linear(a, b, bias=False) for a, b in ((WIDTH, 2), (2, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x)) + self.up(self.down(x))


class Branch(nn.Module):
    """One of two layers, as the data say; each rank and microbatch for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x.sum() > 0 else self.right(x)


class Few(nn.Module):
    """Fewer elements than ranks, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def shared() -> nn.Sequential:
    """One layer is four units, on one rank and on two; a frozen one is two."""
    one, held = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return nn.Sequential(one, held, nn.Tanh(), one, held, one, nn.Tanh(), one)


def frozen() -> nn.Sequential:
    """Whole units that are not trained, before and between those that are."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)])
    for at in (0, 3):
        model[at].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "used twice": lambda: nn.Sequential(*[Twice() for _ in range(4)]),
    "adapted": lambda: nn.Sequential(*[Adapted() for _ in range(4)]),
    "branches": lambda: nn.Sequential(*[Branch() for _ in range(4)]),
    "few": lambda: nn.Sequential(Few(), nn.Linear(WIDTH, WIDTH), Few(), Few()),
    "shared": shared,
    "frozen": frozen,
}


def built(name: str) -> nn.Sequential:
    return MODELS[name]()


def batches(size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, size, WIDTH, generator=generator).double()) for _ in range(STEPS)]


def trial(name: str, **options: Any) -> Trial:
    adam = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    make = SGD if name == "branches" else adam  # AdamW passes over what never has a gradient
    return Trial(
        partial(built, name),
        batches(2 * BATCH),
        optimizer=partial(make, lr=0.1) if make is SGD else make,
        options={"num_microbatches": 4, "partition": "uniform", **options},
    )


def in_microbatches(whole: Trial) -> Trial:
    """As two dp ranks of four microbatches each see the data."""
    pairs = [(x.split(2), target.split(2)) for x, target in whole.steps]
    return replace(whole, steps=[list(zip(*pair, strict=True)) for pair in pairs])


def trials(**options: Any) -> dict[str, Trial]:
    return {
        f"{name} {at}": trial(name, **stage, **options)
        for name in MODELS
        for at, stage in enumerate(STAGES)
    }


@pytest.mark.report("deepspeedai/DeepSpeed#545")
@pytest.mark.report("deepspeedai/DeepSpeed#966")
@pytest.mark.report("deepspeedai/DeepSpeed#7998")
@pytest.mark.report("deepspeedai/DeepSpeed#4966")
@pytest.mark.report("deepspeedai/DeepSpeed#8130")
@pytest.mark.parametrize(
    ("layout", "schedule"), [("1x2x1", "1f1b"), ("2x2x1", "zb-h1"), ("2x2x1", "zbv")]
)
def test_every_way_to_use_parameters_equals_plain_torch_at_every_stage(
    layout: str, schedule: str
) -> None:
    found = named(Grid.parse(layout), trials(schedule=schedule))
    for name in MODELS:
        runs = [found[f"{name} {at}"] for at in range(len(STAGES))]
        expected = by_plain_torch(in_microbatches(trial(name)))
        for run in runs:
            assert_equal(run, expected, name)
        for first, *others in (runs[:4], runs[4:]):
            for other in others:
                assert_same(first, other, name)


def assert_equal(found: Trace, expected: Trace, name: str) -> None:
    for mine, true in zip(found.results, expected.results, strict=True):
        assert mine.loss == pytest.approx(true.loss, rel=1e-12), name
        assert mine.grad_norm == pytest.approx(true.grad_norm, rel=1e-12), name
    for mine, true in zip(found.weights, expected.weights, strict=True):
        full = {key: tensor for key, tensor in true.items() if tensor.numel()}
        assert error({key: mine[key] for key in full}, full) < 1e-10, name


def assert_same(found: Trace, first: Trace, name: str) -> None:
    assert found.results == first.results, name
    assert all(same(a, b) for a, b in zip(found.weights, first.weights, strict=True)), name


def kept_bytes(topology: Topology, name: str) -> dict[int, int]:
    """Bytes of parameters that stay here, by stage."""
    found = {}
    for zero in (1, 3):
        mine = Engine(
            built(name), topology, loss_fn=nn.MSELoss(reduction="sum"), optimizer=SGD, zero=zero
        )
        found[zero] = memory(mine.parts).parameters
    return found


@pytest.mark.parametrize("name", ["adapted", "frozen", "shared"])
def test_frozen_parameters_are_sharded_too_and_shared_ones_once(name: str) -> None:
    first, second = run_on(Grid(dp=2), kept_bytes, name=name)
    assert first == second
    assert first[3] <= 0.75 * first[1], "half, but for the padding of such small buffers"
