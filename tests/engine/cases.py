"""Small models, their plain twins and batches, shared by the tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d import ColumnParallelLinear, Engine, RowParallelLinear, Topology

WIDTH, BATCH = 8, 8
Tensors = dict[str, Tensor]
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Block(nn.Module):
    """x [.., 8] -> x + row(gelu(column(norm(x)))) [.., 8]."""

    def __init__(self, topology: Topology | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        if topology is None:
            self.up: nn.Module = nn.Linear(WIDTH, 12)
            self.down: nn.Module = nn.Linear(12, WIDTH)
        else:
            self.up = ColumnParallelLinear(WIDTH, 12, axis=topology.tp)
            self.down = RowParallelLinear(12, WIDTH, axis=topology.tp)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Counting(torch.optim.SGD):
    """Divides by its number of steps, which it keeps in its groups."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["lr"] /= group["k"]
        super().step(closure)


def blocks(topology: Topology | None, count: int = 4) -> nn.Sequential:
    """On meta under a topology; the plain twin without."""
    with torch.device("cpu" if topology is None else "meta"):
        return nn.Sequential(*[Block(topology) for _ in range(count)])


def batch(
    step: int, size: int = BATCH, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The whole batch of a step; the same in every dtype."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, size, WIDTH, generator=generator).to(dtype)
    return x, target


def share(topology: Topology, *tensors: Tensor) -> tuple[Tensor, ...]:
    """This dp rank's part of each."""
    return tuple(torch.tensor_split(t, topology.dp.size)[topology.dp.rank] for t in tensors)


def engine(topology: Topology, model: nn.Module | None = None, **options: Any) -> Engine:
    """Of ``blocks``, in fp64 and 2 microbatches, unless said otherwise."""
    defaults = {
        "loss_fn": nn.MSELoss(reduction="sum"),
        "optimizer": ADAMW,
        "num_microbatches": 2,
        "precision": "fp64",
    }
    return Engine(model or blocks(topology), topology, **{**defaults, **options})


def train(of: Engine, steps: Sequence[int] | int, size: int = BATCH) -> list[tuple[float, float]]:
    """(loss, grad_norm) of each step."""
    results = []
    for step in range(steps) if isinstance(steps, int) else steps:
        result = of.train_step(*share(of.topology, *batch(step, size, torch.float64)))
        results.append((result.loss, result.grad_norm))
    return results


def train_plainly(
    model: nn.Module,
    steps: int,
    make: Callable[..., torch.optim.Optimizer] = ADAMW,
    max_norm: float = torch.inf,
    dtype: torch.dtype = torch.float64,
) -> list[tuple[float, float]]:
    """The same in plain PyTorch: one backward of the mean over the whole batch."""
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    results = []
    for step in range(steps):
        x, target = batch(step, dtype=dtype)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


def plain(initial: Tensors, dtype: torch.dtype = torch.float64, count: int = 4) -> nn.Sequential:
    """The twin of ``blocks`` with these values."""
    model = blocks(None, count).to(dtype)
    model.load_state_dict(initial)
    return model


def same(a: Tensors, b: Tensors) -> bool:
    """Whether two state dicts are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def error(found: Tensors, expected: Tensors) -> float:
    """The largest difference, each tensor's relative to its largest element."""
    assert found.keys() == expected.keys()
    return max(
        (found[k] - expected[k]).abs().max().item() / max(expected[k].abs().max().item(), 1e-30)
        for k in expected
    )
