"""The engine's arguments that the parts are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from ..config.schema import Fp16
from ..config.shared import (
    check_loss_scale,
    check_mapping,
    check_offload,
    check_precision,
    check_recompute,
    check_zero,
)
from ..config.values import convert
from ..optim.make import Options as Group
from ..optim.scaler import LossScaler
from ..pipeline.actions import Program
from ..pipeline.criterion import LossFn


@dataclass(frozen=True)
class Offload:
    """What leaves the device, and where to; ``path`` is the folder of what goes to disk."""

    optimizer: str = "none"
    parameters: str = "none"
    activations: str = "none"
    path: str | None = None

    @classmethod
    def of(cls, asked: Offload | Mapping[str, Any] | None) -> Offload:
        """From the engine's argument. Raises ValueError for a key that is none."""
        if isinstance(asked, Offload):
            return asked
        check_mapping("offload", {} if asked is None else asked, asdict(cls()))
        return cls(**(asked or {}))


def scaler_of(precision: str, asked: Mapping[str, Any] | None) -> LossScaler | None:
    """From the engine's arguments; None unless ``precision`` is fp16. Raises ValueError."""
    hints = get_type_hints(Fp16)
    for key, value in (asked or {}).items():
        convert(value, hints[key], f"fp16.{key}")
    check_loss_scale(precision, asked or {})
    return LossScaler(**(asked or {})) if precision == "fp16" else None


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
    zero_reduce: str = "each"
    gather_budget: int | None = None
    shard_size: int | None = None
    reduce_dtype: str | None = None
    precision: str = "fp32"
    recompute: str = "none"
    recompute_every: int = 1
    recompute_partition: bool = False
    offload: Offload = Offload()
    state_dtype: str | None = None
    tied: Sequence[Sequence[str]] | None = None
    init: Callable[[str, Tensor], object] | None = None
    compile: bool = False
    timeout: float = 600.0
    seed: int = 0

    def check(self, dp: int, tp: int) -> None:
        """Raise ValueError, in the words of the configuration, for what contradicts itself."""
        check_precision(self.precision, self.reduce_dtype)
        check_zero(self.zero, self.zero_reduce, self.gather_budget, self.shard_size, dp)
        check_offload(asdict(self.offload), self.zero)
        check_recompute(
            self.recompute,
            self.recompute_every,
            self.recompute_partition,
            compiled=self.compile,
            tp=tp,
        )
