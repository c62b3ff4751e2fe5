"""Optimizers over whole parameters beside their plain twins, and a model of ragged shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d import (
    ColumnParallelLinear,
    Engine,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
)
from parallel3d.optim import Lamb, Muon
from tests.engine.cases import (
    engine,
    share,
)

STEPS = 5
LAMB: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
MUON |= {"adjust_lr_fn": "match_rms_adamw"}
ADAFACTOR: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.1, "d": 1.5}


class PlainLamb(torch.optim.Optimizer):
    """You et al. (2020), algorithm 2, over whole parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for w in group["params"]:
                s = self.state[w]
                t = s["t"] = s.get("t", 0) + 1
                s["m"] = beta1 * s.get("m", 0.0) + (1 - beta1) * w.grad
                s["v"] = beta2 * s.get("v", 0.0) + (1 - beta2) * w.grad**2
                m, v = s["m"] / (1 - beta1**t), s["v"] / (1 - beta2**t)
                u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * w
                ratio = (w.norm() / u.norm()).item() if w.norm() > 0 and u.norm() > 0 else 1.0
                w -= lr * ratio * u


class PlainMuon(torch.optim.Optimizer):
    """torch's own over matrices, torch's AdamW over the rest."""

    def __init__(self, params: Any, **options: Any) -> None:
        held = list(params)
        super().__init__(held, options)
        shared = {key: options[key] for key in ("lr", "weight_decay")}
        rest = {key: options[key] for key in ("betas", "eps")}
        matrices = {key: options[key] for key in options.keys() - rest}
        self.inner = [
            torch.optim.Muon([p for p in held if p.ndim == 2], **matrices),
            torch.optim.AdamW([p for p in held if p.ndim != 2], **shared, **rest),
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for inner in self.inner:
            inner.step()


OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lamb": (partial(Lamb, **LAMB), partial(PlainLamb, **LAMB)),
    "adafactor": (partial(torch.optim.Adafactor, **ADAFACTOR),) * 2,
    "muon": (partial(Muon, **MUON), partial(PlainMuon, **MUON)),
}
NAMES = list(OPTIMIZERS)
ZEROS = (0, 1, 2, 3)


class Ragged(nn.Module):
    """x [.., 10] -> x + row(column(x)): rows of 10 and 30 end nowhere near a shard's border."""

    def __init__(self, topology: Topology | None) -> None:
        super().__init__()
        if topology is None:
            self.table: nn.Module = nn.Embedding(11, 10)
            self.up: nn.Module = nn.Linear(10, 60)
            self.down: nn.Module = nn.Linear(30, 10)
        else:
            axis = topology.tp
            self.table = VocabParallelEmbedding(11, 10, axis=axis)
            self.up = ColumnParallelLinear(10, 60, axis=axis, blocks=2, gather_output=True)
            self.down = RowParallelLinear(30, 10, axis=axis, input_is_parallel=False)
        self.scale = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x + self.table(x.argmax(-1))).chunk(2, -1)
        return x + self.scale * self.down(torch.tanh(gate) * up)


def ragged(topology: Topology | None) -> nn.Sequential:
    with torch.device("cpu" if topology is None else "meta"):
        return nn.Sequential(*[Ragged(topology) for _ in range(2)])


def ragged_batch(step: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, 12, 10, generator=torch.Generator().manual_seed(step)).double()
    return x, target


def ragged_engine(topology: Topology, name: str, **options: Any) -> Engine:
    options = {"lr_schedule": lambda step: 1 / (step + 1), **options}
    options = {"max_grad_norm": 0.7, "zero_reduce": "last", **options}
    return engine(topology, ragged(topology), optimizer=OPTIMIZERS[name][0], **options)


def ragged_steps(mine: Engine, steps: range) -> list[Any]:
    return [mine.train_step(*share(mine.topology, *ragged_batch(step))) for step in steps]
