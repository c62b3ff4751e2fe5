"""Engines whose optimizer lives elsewhere, with what a step can have."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d import Engine, Topology
from tests.engine.cases import batch, engine, share, train

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), fused=True)


def groups(name: str, parameter: Tensor) -> dict[str, Any]:
    return {"weight_decay": 0.1 if parameter.ndim > 1 else 0.0}


def places(folder: Path) -> list[dict[str, str]]:
    return [{"optimizer": "cpu"}, {"optimizer": "disk", "path": str(folder)}]


def made(topology: Topology, model: nn.Sequential | None = None, **options: Any) -> Engine:
    """Two groups, a schedule of the rate, and clipping."""
    defaults = {
        "optimizer": ADAMW,
        "param_groups": groups,
        "lr_schedule": lambda step: 1 / (1 + step),
        "max_grad_norm": 0.5,
    }
    return engine(topology, model, **{**defaults, **options})


def run_of(of: Engine) -> Any:
    """Three steps, one that is skipped and two more: what was told, and what came of it."""
    told = [train(of, 3)]
    x, target = share(of.topology, *batch(3, dtype=torch.float64))
    told.append([repr(of.train_step(x * torch.nan, target))])
    told.append(train(of, [4, 5]))
    return told, of.state_dict_whole()
