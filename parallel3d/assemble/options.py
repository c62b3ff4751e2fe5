"""The engine's arguments that the parts are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from ..optim.optimizer import Options as Group
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
        """From the engine's argument. Raises ValueError for a key or a place that is none."""
        if asked is None or isinstance(asked, Offload):
            asked = asdict(asked or cls())
        if not isinstance(asked, Mapping):
            raise ValueError(f"offload = {asked!r} is not a mapping like {{'optimizer': 'cpu'}}")
        known = [each.name for each in fields(cls)]
        for key, value in asked.items():
            if key not in known:
                close = get_close_matches(key, known, n=1, cutoff=0.0)
                raise ValueError(f"offload.{key} is not a key; did you mean offload.{close[0]}?")
            if key != "path" and value not in PLACES[key]:
                raise ValueError(
                    f"offload.{key} = {value!r} is not one of {', '.join(PLACES[key])}"
                )
        made = cls(**asked)
        if made.optimizer == "disk" and made.path is None:
            raise ValueError(
                "offload.optimizer = disk, but offload.path is null: set it to a folder on a "
                "local disk, or offload.optimizer=cpu"
            )
        if made.optimizer != "disk" and made.path is not None:
            raise ValueError(
                f"offload.path = {made.path}, but nothing goes to disk: set "
                f"offload.optimizer=disk, or offload.path=null"
            )
        return made


PLACES = {
    "optimizer": ("none", "cpu", "disk"),
    "parameters": ("none", "cpu"),
    "activations": ("none", "cpu"),
}


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
