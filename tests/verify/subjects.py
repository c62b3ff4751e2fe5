"""Small models to prove: three of the `models` folder, and one of a user's own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d import ColumnParallelLinear, RowParallelLinear, Topology
from parallel3d.verify import Subject, presets

LANGUAGE = {
    "vocab_size": 11,
    "width": 16,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_width": 12,
    "max_seq_len": 8,
}
GROUPED = {**LANGUAGE, "num_kv_heads": 2, "rope_theta": 100.0}
REGRESSION = {"in_features": 3, "out_features": 2, "width": 8, "num_layers": 2, "ffn_width": 12}
GPT = presets.of_model("models.gpt", LANGUAGE)
SUBJECTS = {
    "gpt": GPT,
    "llama": presets.of_model("models.llama", GROUPED),
    "mlp": presets.of_model("models.mlp", REGRESSION),
}


def build(topology: Topology) -> nn.Sequential:
    up = partial(ColumnParallelLinear, 6, 8, axis=topology.tp)
    down = partial(RowParallelLinear, 8, 6, axis=topology.tp)
    return nn.Sequential(*[nn.Sequential(nn.LayerNorm(6), up(), nn.GELU(), down()) for _ in "123"])


def reference() -> nn.Sequential:
    return nn.Sequential(
        *[
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
            for _ in "123"
        ]
    )


def flat_reference() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in "123"])


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().sum()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(step))
    return x, target


def failing_build(topology: Topology) -> nn.Sequential:
    if topology.rank == 1:
        raise RuntimeError("this rank fails")
    return build(topology)


def ending_build(topology: Topology) -> nn.Sequential:
    if topology.rank == 1:
        raise SystemExit(3)
    return build(topology)


OWN: dict[str, Any] = {"build": build, "reference": reference, "loss": distance, "batch": batch}
SUBJECT = Subject(build, reference, distance, batch)
