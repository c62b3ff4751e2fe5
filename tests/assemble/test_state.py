from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import gpt
from parallel3d import Engine, Grid, Topology, vocab_parallel_cross_entropy
from parallel3d.assemble.state import load_weights, whole_gradients
from tests.engine import state_cases
from tests.engine.cases import batch, blocks, engine, error, plain, same, share, train
from tests.world import run_on

SIZES = {
    "vocab_size": 11,
    "width": 8,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_width": 16,
    "max_seq_len": 6,
    "tied": True,
}


def tied_gpt(topology: Topology) -> tuple[Engine, list[str]]:
    with torch.device("meta"):
        model = gpt.build(topology, **SIZES)
    names = list(model.state_dict())
    made = Engine(
        model,
        topology,
        loss_fn=partial(vocab_parallel_cross_entropy, axis=topology.tp),
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        num_microbatches=2,
        precision="fp64",
        max_grad_norm=1.0,
    )
    return made, names


def steps(mine: Engine, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        generator = torch.Generator().manual_seed(mine.step)
        x, target = torch.randint(11, (2, 8, 6), generator=generator)
        losses.append(mine.train_step(*share(mine.topology, x, target)).loss)
    return losses


def save_tied(topology: Topology, folder: Path) -> Any:
    mine, names = tied_gpt(topology)
    losses = steps(mine, 3)
    mine.save(folder)
    weights = mine.state_dict_whole()
    return names, weights, losses, steps(mine, 2)


@pytest.mark.report("deepspeedai/DeepSpeed#966")
def test_a_tied_gpt_is_saved_once_and_goes_on_under_another_layout(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    names, weights, losses, later = run_on(Grid(dp=2, tp=2), save_tied, folder=folder)[0]
    assert set(weights) == set(names)
    ties = [a for a in names for b in names if a < b and torch.equal(weights[a], weights[b])]
    assert len(ties) == 1, "embedding and head"
    saved = json.loads((folder / "manifest.json").read_text())["tensors"]
    kinds = {key.split("/")[0] for key in saved}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq"}
    assert len(saved) == 3 * (len(names) - 1)
    with Topology.init() as topology:
        mine, _ = tied_gpt(topology)
        model = gpt.reference(**SIZES).double()
        model.load_state_dict(mine.state_dict_whole())
        assert steps(mine, 3) == pytest.approx(losses, rel=1e-12)
        assert train_gpt_plainly(model, 3) == pytest.approx(losses, rel=1e-11)
        resumed, _ = tied_gpt(topology)
        resumed.load(folder)
        assert same(resumed.state_dict_whole(), weights)
        assert steps(resumed, 2) == pytest.approx(later, rel=1e-12)


def train_gpt_plainly(model: nn.Module, count: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        x, target = torch.randint(11, (2, 8, 6), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), target.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def gradients(topology: Topology) -> Any:
    """Whole gradients between the reduction and the update, and the initial weights."""
    mine, found = engine(topology), []
    initial = mine.state_dict_whole()
    update = mine.parts.optimizer.step

    def step() -> None:
        found.append(whole_gradients(mine.parts))
        update()

    mine.parts.optimizer.step = step  # type: ignore[method-assign]
    train(mine, 1)
    return initial, found[0]


@pytest.mark.parametrize("layout", ["1x1x1", "2x2x1", "1x2x2"])
def test_whole_gradients_are_those_of_plain_pytorch(layout: str) -> None:
    (initial, found), *others = run_on(Grid.parse(layout), gradients)
    assert all(other == ({}, {}) for other in others)
    model = plain(initial)
    x, target = batch(0, dtype=torch.float64)
    nn.functional.mse_loss(model(x), target).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert error(found, expected) < 1e-12


def test_names_and_dtypes_are_those_of_the_model() -> None:
    with Topology.init() as topology:
        mine = state_cases.engine(topology, precision="bf16")
        whole = mine.state_dict_whole()
        expected = state_cases.model(topology).state_dict()
        assert {name: value.shape for name, value in whole.items()} == {
            name: value.shape for name, value in expected.items()
        }
        assert {value.dtype for value in whole.values()} == {torch.float32}
        blocks(None).load_state_dict(engine(topology, precision="fp32").state_dict_whole())


def weights_only(topology: Topology, folder: Path) -> Any:
    """Weights of a training run in fp64, in an engine without its optimizer, in bf16."""
    mine = state_cases.engine(topology)
    state_cases.train(mine, 2)
    mine.save(folder, note=1)
    expected = mine.state_dict_whole()
    other = state_cases.engine(topology, precision="bf16", optimizer=torch.optim.SGD)
    assert load_weights(other.parts, folder)["note"] == 1
    found = other.state_dict_whole()
    return expected, found


def test_weights_load_alone_and_in_another_precision(tmp_path: Path) -> None:
    expected, found = run_on(Grid(dp=2, tp=2), weights_only, folder=tmp_path / "checkpoint")[0]
    for name, value in found.items():
        frozen = name.endswith("scale")
        rounded = expected[name].bfloat16().float() if frozen else expected[name].float()
        assert torch.equal(value, rounded), name
