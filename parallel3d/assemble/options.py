"""The engine's arguments that the parts are made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..optim.optimizer import Options as Group
from ..pipeline.actions import Program
from ..pipeline.criterion import LossFn


@dataclass
class Options:
    """The engine's arguments, as ``Engine`` documents them."""

    loss_fn: LossFn
    optimizer: Callable[..., torch.optim.Optimizer]
    num_items: Callable[[Any], Tensor | int] | None = None
    param_groups: Callable[[str, nn.Parameter], Group] | None = None
    lr_schedule: Callable[[int], float] | None = None
    schedule: str | Program = "1f1b"
    num_microbatches: int = 1
    num_chunks: int | None = None
    partition: str | Sequence[int] = "parameters"
    memory_limit: float | None = None
    sample: tuple[Any, Any] | None = None
    zero: int = 1
    precision: str = "fp32"
    recompute: str = "none"
    tied: Sequence[Sequence[str]] | None = None
    init: Callable[[str, Tensor], object] | None = None
    compile: bool = False
    timeout: float = 600.0
    seed: int = 0
