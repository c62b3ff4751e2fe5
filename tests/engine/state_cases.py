"""A model with everything that a checkpoint must hold, and its whole state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d import (
    ColumnParallelLinear,
    Engine,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from parallel3d.assemble.state import _optimizer_state
from parallel3d.assemble.whole import join
from parallel3d.tensor import VocabParallelLinear
from tests.engine.cases import Tensors, share

VOCABULARY, WIDTH = 11, 8


class Layer(nn.Module):
    """x + row(a * gelu(b) + c), a b c fused in one column; a frozen scale and a buffer."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.up = ColumnParallelLinear(WIDTH, 12, axis=topology.tp, blocks=3)
        self.down = RowParallelLinear(4, WIDTH, axis=topology.tp)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("kept", torch.empty(2, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale, 1.0, 0.1)
        nn.init.ones_(self.gain)
        nn.init.constant_(self.kept, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(self.norm(x) * self.scale).chunk(3, -1)
        return x + self.gain * self.kept[0] * self.down(a * nn.functional.gelu(b) + c)


def model(topology: Topology, layers: int = 3) -> nn.Sequential:
    """On meta: an embedding whose table tp does not divide, layers, and a head."""
    with torch.device("meta"):
        return nn.Sequential(
            VocabParallelEmbedding(VOCABULARY, WIDTH, axis=topology.tp),
            *[Layer(topology) for _ in range(layers)],
            VocabParallelLinear(WIDTH, VOCABULARY, axis=topology.tp),
        )


def groups(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    """Two groups that interleave: matrices are decayed."""
    return {"weight_decay": 0.1 if parameter.ndim > 1 else 0.0}


def engine(topology: Topology, **options: Any) -> Engine:
    """Of ``model`` in fp64 under AdamW with AMSGrad, so that there are three moments."""
    defaults: dict[str, Any] = {
        "loss_fn": partial(vocab_parallel_cross_entropy, axis=topology.tp),
        "optimizer": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
        "param_groups": groups,
        "lr_schedule": lambda step: 1 / (1 + step),
        "num_microbatches": 2,
        "precision": "fp64",
        "max_grad_norm": 1.0,
    }
    return Engine(model(topology), topology, **{**defaults, **options})


def train(of: Engine, steps: int) -> list[float]:
    """Losses of the next steps; the batch is a function of the step."""
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(of.step)
        x, target = torch.randint(VOCABULARY, (2, 8, 5), generator=generator)
        losses.append(of.train_step(*share(of.topology, x, target)).loss)
    return losses


def whole(of: Engine) -> Tensors:
    """Everything but counters, whole, on rank 0: weights, buffers, moments."""
    parts = of.parts
    found = {f"weight/{name}": tensor for name, tensor in of.state_dict_whole().items()}
    states = parts.optimizer.states()
    for kind in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum"):
        fragments = _optimizer_state(parts, states, kind, saving=True)
        moments = join(fragments, parts.topology.world)
        found |= {f"{kind}/{name}": tensor for name, tensor in moments.items()}
    return found


def step_counts(of: Engine) -> set[float]:
    """The optimizer's own counts, one for each part."""
    return {float(state["step"]) for state in of.parts.optimizer.states()}


def save_each(topology: Topology, folder: Path) -> Any:
    """Three steps under each stage of ZeRO, a checkpoint of each, two more steps."""
    found = []
    for zero in range(4):
        mine = engine(topology, zero=zero, zero_reduce="last")
        train(mine, 3)
        mine.save(folder / f"{topology.grid}-{zero}", note="kept")
        state = whole(mine)
        found.append((state, train(mine, 2)))
    return found
