"""What a training run leaves to be compared, and the optimizers it is run under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
}


@dataclass(frozen=True)
class Setting:
    """Equal for every run of a proof.

    ``max_grad_norm`` is half the norm of the reference's first gradient, so that clipping acts.
    """

    steps: int = 3
    num_microbatches: int = 4
    partition: str = "parameters"
    max_grad_norm: float = 1.0
    seed: int = 0


@dataclass
class Run:
    """A few steps under one optimizer, in whole tensors by name.

    ``gradients`` are the first step's, before clipping; ``unequal_copies`` names parameters of
    which ranks that should hold the same values do not.
    """

    losses: list[float]
    norms: list[float]
    gradients: Tensors
    weights: Tensors
    unequal_copies: list[str]


Trace = dict[str, Run]
"""A run under each of ``OPTIMIZERS``."""
