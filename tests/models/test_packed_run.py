"""Runs of a recipe's configuration with data.documents=true against plain torch on padded rows."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import models.gpt
import models.llama
from parallel3d.build import build_data, build_engine, build_model
from parallel3d.config import Config, compose, settle
from parallel3d.data import Prefetch, TokenFiles
from parallel3d.optim.schedule import lr_curve
from parallel3d.topology import Grid, Topology
from parallel3d.train import evaluate, slots_of
from tests.data.corpus import write
from tests.models.padding import Apart, apart
from tests.world import run_on

STEPS, VOCAB = 4, 31
SIZES = {
    "vocab_size": VOCAB,
    "width": 16,
    "num_layers": 3,
    "num_heads": 4,
    "ffn_width": 24,
    "max_seq_len": 12,
}
MODELS: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "gpt_tiny": (models.gpt, SIZES),
    "llama_tiny": (models.llama, {**SIZES, "num_kv_heads": 2}),
}
OPTIMIZERS = {"sgd": ("optim.lr=0.5", "optim.weight_decay=0"), "adamw": ("optim.lr=1e-2",)}


def config_of(path: str, model: str, optimizer: str, grid: Grid) -> Config:
    config = compose(
        f"model={model}",
        *(f"model.{key}={value}" for key, value in MODELS[model][1].items()),
        f"optim.name={optimizer}",
        *OPTIMIZERS[optimizer],
        f"data.path={path}",
        "data.documents=true",
        "data.validation_share=0.3",
        "data.seq_len=12",
        "data.global_batch_size=8",
        "pipeline.num_microbatches=2",
        f"train.steps={STEPS}",
        "train.eval_batches=2",
        "train.max_grad_norm=0",
        "optim.warmup_steps=2",
        "precision=fp64",
    )
    return settle(config, grid.pp, grid.dp, grid.tp)


def by_engine(topology: Topology, path: str, model: str, optimizer: str) -> tuple[Any, ...]:
    """Losses of the steps and of validation, the weights at the start and at the end."""
    config = config_of(path, model, optimizer, topology.grid)
    data = build_data(config)
    engine = build_engine(config, topology, build_model(config, topology, data))
    first, slots = engine.state_dict_whole(), slots_of(config, topology)
    losses = [
        engine.train_step(x, target).loss for x, target in Prefetch(data.train, slots, 0, STEPS)
    ]
    held_out = evaluate(config, topology, data, engine)
    return losses, held_out, first, engine.state_dict_whole()


def batch(x: Tensor, target: Tensor) -> Apart:
    """Documents of plain windows, known by the token 0, which starts each and is nowhere else."""
    return apart(x, (x == 0).cumsum(1), target.masked_fill(target == 0, -100))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def items(alone: Apart) -> int:
    return int((alone.target != -100).sum())


def by_plain_torch(
    config: Config, model: str, first: dict[str, Tensor]
) -> tuple[list[float], float, dict[str, Tensor]]:
    package, sizes = MODELS[model]
    plain = package.reference(**sizes).double()
    plain.load_state_dict(first)
    decay = config.optim.weight_decay
    groups = [
        {"params": [parameter], "weight_decay": decay if parameter.ndim >= 2 else 0.0}
        for parameter in plain.parameters()
    ]
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[str(config.optim.name)]
    keys = {"betas": config.optim.betas} if kind is torch.optim.AdamW else {}
    optimizer = kind(groups, lr=config.optim.lr, **keys)
    curve = lr_curve(config.optim.lr_schedule, STEPS, 2, config.optim.min_lr_ratio)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, curve)
    data = TokenFiles(config.data.path or "", 12, 8, validation_share=0.3)

    losses = []
    for step in range(STEPS):
        alone = batch(*data.train(step, range(8)))
        loss = loss_of(plain(alone.x), alone.target) / items(alone)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    held_out = [batch(*data.validation(step, range(8))) for step in range(2)]
    with torch.no_grad():
        total = sum(loss_of(plain(alone.x), alone.target).item() for alone in held_out)
    return losses, total / sum(map(items, held_out)), plain.state_dict()


@pytest.mark.report("KempnerInstitute/KempnerForge#204")
@pytest.mark.parametrize(
    ("layout", "model", "optimizer"),
    [("2x1x1", "gpt_tiny", "sgd"), ("2x1x2", "llama_tiny", "adamw"), ("2x2x1", "gpt_tiny", "sgd")],
)
def test_a_run_with_documents_is_plain_torch_on_padded_ones(
    layout: str, model: str, optimizer: str, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 20, (60,), generator=generator).tolist()
    texts = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    path = str(write(tmp_path / "data", [[0, *text] for text in texts], VOCAB))
    grid = Grid.parse(layout)
    losses, held_out, first, last = run_on(
        grid, by_engine, path=path, model=model, optimizer=optimizer
    )[0]
    config = config_of(path, model, optimizer, grid)
    true_losses, true_held_out, true_last = by_plain_torch(config, model, first)
    assert losses == pytest.approx(true_losses, rel=1e-12)
    assert held_out == pytest.approx(true_held_out, rel=1e-12)
    for name, true in true_last.items():
        moved = (true - first[name]).abs().max()
        assert (last[name] - true).abs().max() <= 1e-11 * moved, name
