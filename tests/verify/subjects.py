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


class Unit(nn.Module):
    """With a frozen parameter, one that is never used, a scalar, and a buffer."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.norm.weight.requires_grad_(False)
        self.up, self.down = up, down
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x) + self.shift)))


def build(topology: Topology) -> nn.Sequential:
    up = partial(ColumnParallelLinear, 6, 8, axis=topology.tp)
    down = partial(RowParallelLinear, 8, 6, axis=topology.tp)
    return nn.Sequential(*[Unit(up(), down()) for _ in range(3)])


def reference() -> nn.Sequential:
    return nn.Sequential(*[Unit(nn.Linear(6, 8), nn.Linear(8, 6)) for _ in range(3)])


def other_reference() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])


def distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().sum()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(step))
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
GPT = presets.of_model("models.gpt", LANGUAGE)
GPT_TIED = presets.of_model("models.gpt", {**LANGUAGE, "tied": True})
SUBJECTS = {
    "llama": presets.of_model("models.llama", GROUPED),
    "mlp": presets.of_model("models.mlp", REGRESSION),
    "own": SUBJECT,
}
NINE_UNITS = {**LANGUAGE, "width": 8, "num_heads": 2, "num_layers": 7, "max_seq_len": 4}
DEEP = {
    "gpt": presets.of_model("models.gpt", NINE_UNITS),
    "gpt, tied": presets.of_model("models.gpt", {**NINE_UNITS, "tied": True}),
}
