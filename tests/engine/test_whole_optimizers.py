"""Optimizers that look at whole parameters, under every layout, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import (
    ColumnParallelLinear,
    Engine,
    Grid,
    RowParallelLinear,
    Topology,
    VocabParallelEmbedding,
)
from parallel3d.build import build_engine, build_model
from parallel3d.config import compose, settle
from parallel3d.memory import memory, predicted
from parallel3d.optim.lamb import Lamb
from parallel3d.optim.muon import Muon, deal
from parallel3d.optim.newton_schulz import orthogonal
from parallel3d.optim.whole import WholeOptimizer
from tests.engine.cases import (
    Tensors,
    engine,
    error,
    plain,
    same,
    share,
    train,
    train_plainly,
)
from tests.world import run_on

STEPS = 5
LAMB: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
MUON |= {"adjust_lr_fn": "match_rms_adamw"}
ADAFACTOR: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.1, "d": 1.5}


class PlainLamb(torch.optim.Optimizer):
    """You et al. (2020), algorithm 2, over whole parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for w in group["params"]:
                s = self.state[w]
                t = s["t"] = s.get("t", 0) + 1
                s["m"] = beta1 * s.get("m", 0.0) + (1 - beta1) * w.grad
                s["v"] = beta2 * s.get("v", 0.0) + (1 - beta2) * w.grad**2
                m, v = s["m"] / (1 - beta1**t), s["v"] / (1 - beta2**t)
                u = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * w
                ratio = (w.norm() / u.norm()).item() if w.norm() > 0 and u.norm() > 0 else 1.0
                w -= lr * ratio * u


class PlainMuon(torch.optim.Optimizer):
    """torch's own over matrices, torch's AdamW over the rest."""

    def __init__(self, params: Any, **options: Any) -> None:
        held = list(params)
        super().__init__(held, options)
        shared = {key: options[key] for key in ("lr", "weight_decay")}
        rest = {key: options[key] for key in ("betas", "eps")}
        matrices = {key: options[key] for key in options.keys() - rest}
        self.inner = [
            torch.optim.Muon([p for p in held if p.ndim == 2], **matrices),
            torch.optim.AdamW([p for p in held if p.ndim != 2], **shared, **rest),
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for inner in self.inner:
            inner.step()


OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "lamb": (partial(Lamb, **LAMB), partial(PlainLamb, **LAMB)),
    "adafactor": (partial(torch.optim.Adafactor, **ADAFACTOR),) * 2,
    "muon": (partial(Muon, **MUON), partial(PlainMuon, **MUON)),
}
NAMES = list(OPTIMIZERS)
ZEROS = (0, 1, 2, 3)


def trained(topology: Topology, name: str, **options: Any) -> tuple[Tensors, Any, Tensors]:
    """Initial values, losses and weights, the same at every ZeRO stage."""
    found = []
    for zero in ZEROS:
        mine = engine(topology, optimizer=OPTIMIZERS[name][0], zero=zero, **options)
        initial = mine.state_dict_whole()
        found.append((initial, train(mine, STEPS), mine.state_dict_whole()))
    for _, losses, weights in found[1:]:
        assert losses == found[0][1] and same(weights, found[0][2])
    return found[0]


def each_trained(topology: Topology) -> dict[str, Any]:
    return {name: trained(topology, name) for name in NAMES}


@pytest.mark.parametrize("layout", ["1x1x1", "1x3x1", "1x1x2", "2x2x1", "1x2x2"])
def test_any_layout_does_what_plain_pytorch_does(layout: str) -> None:
    for name, (initial, found, weights) in run_on(Grid.parse(layout), each_trained)[0].items():
        model = plain(initial)
        expected = train_plainly(model, STEPS, OPTIMIZERS[name][1])
        assert torch.tensor(found) == pytest.approx(torch.tensor(expected), rel=1e-12), name
        assert error(weights, dict(model.state_dict())) < 1e-10, name


class Ragged(nn.Module):
    """x [.., 10] -> x + row(column(x)): rows of 10 and 30 end nowhere near a shard's border."""

    def __init__(self, topology: Topology | None) -> None:
        super().__init__()
        if topology is None:
            self.table: nn.Module = nn.Embedding(11, 10)
            self.up: nn.Module = nn.Linear(10, 60)
            self.down: nn.Module = nn.Linear(30, 10)
        else:
            axis = topology.tp
            self.table = VocabParallelEmbedding(11, 10, axis=axis)
            self.up = ColumnParallelLinear(10, 60, axis=axis, blocks=2, gather_output=True)
            self.down = RowParallelLinear(30, 10, axis=axis, input_is_parallel=False)
        self.scale = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x + self.table(x.argmax(-1))).chunk(2, -1)
        return x + self.scale * self.down(torch.tanh(gate) * up)


def ragged(topology: Topology | None) -> nn.Sequential:
    with torch.device("cpu" if topology is None else "meta"):
        return nn.Sequential(*[Ragged(topology) for _ in range(2)])


def ragged_batch(step: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, 12, 10, generator=torch.Generator().manual_seed(step)).double()
    return x, target


def ragged_engine(topology: Topology, name: str, **options: Any) -> Engine:
    options = {"max_grad_norm": 0.7, "lr_schedule": lambda step: 1 / (step + 1), **options}
    return engine(topology, ragged(topology), optimizer=OPTIMIZERS[name][0], **options)


def ragged_steps(mine: Engine, steps: range) -> list[Any]:
    return [mine.train_step(*share(mine.topology, *ragged_batch(step))) for step in steps]


def trained_ragged(topology: Topology) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        every = []
        for zero in ZEROS:
            mine = ragged_engine(topology, name, zero=zero)
            initial = mine.state_dict_whole()
            every.append((initial, ragged_steps(mine, range(3)), mine.state_dict_whole()))
        assert every[0][1] == every[1][1] and same(every[0][2], every[1][2])
        found[name] = every[0]
    return found


@pytest.mark.parametrize("layout", ["1x3x1", "1x1x3", "2x2x1", "1x2x2"])
def test_slices_that_end_inside_rows_and_padded_blocks_change_nothing(layout: str) -> None:
    """Also with clipping, a schedule of the rate, fused blocks, and a table with padding."""
    found = run_on(Grid.parse(layout), trained_ragged)[0]
    for name, (initial, _, weights) in found.items():
        model = ragged(None).double()
        model.load_state_dict(initial)
        optimizer = OPTIMIZERS[name][1](model.parameters())
        groups = [g for o in getattr(optimizer, "inner", [optimizer]) for g in o.param_groups]
        rate = groups[0]["lr"]
        for step in range(3):
            for group in groups:
                group["lr"] = rate / (step + 1)
            x, target = ragged_batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
        assert error(weights, dict(model.state_dict())) < 1e-10, name


def of_schedules(topology: Topology) -> list[Any]:
    """Losses and weights of each optimizer in each precision, the same under every schedule."""
    schedules = ["1f1b", "zbv"] if topology.pp.size > 1 else ["1f1b"]
    kept = []
    for name, precision in product(NAMES, ["fp64", "bf16", "fp16"]):
        found = [trained(topology, name, schedule=s, precision=precision) for s in schedules]
        for _, losses, weights in found[1:]:
            assert losses == found[0][1] and same(weights, found[0][2])
        kept.append(found[0][1:])
    return kept


def test_no_pipeline_schedule_or_zero_stage_changes_a_bit() -> None:
    one, two = (run_on(grid, of_schedules)[0] for grid in (Grid(dp=2), Grid(pp=2, dp=2)))
    for (losses, weights), (others, other_weights) in zip(one, two, strict=True):
        assert losses == others and same(weights, other_weights)


def state_of(mine: Engine) -> Any:
    return [{k: v.clone() for k, v in s.items()} for s in mine.parts.optimizer.states()]


def saved(topology: Topology, folder: Path) -> dict[str, Any]:
    """6 steps at once, with a checkpoint after 3; a reload of it has the same bits here."""
    found = {}
    for name in NAMES:
        mine = ragged_engine(topology, name)
        ragged_steps(mine, range(3))
        mine.save(folder / name)
        before = state_of(mine)
        results = ragged_steps(mine, range(3, 6))
        again = ragged_engine(topology, name)
        again.load(folder / name)
        for kept, read in zip(before, state_of(again), strict=True):
            assert kept.keys() == read.keys()
            assert all(torch.equal(kept[key], read[key]) for key in kept)
        assert ragged_steps(again, range(3, 6)) == results
        assert same(again.state_dict_whole(), mine.state_dict_whole())
        found[name] = mine.state_dict_whole()
    return found


def loaded(topology: Topology, folder: Path, zero: int) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        mine = ragged_engine(topology, name, zero=zero)
        mine.load(folder / name)
        ragged_steps(mine, range(3, 6))
        found[name] = mine.state_dict_whole()
    return found


@pytest.mark.parametrize(
    ("before", "after", "zero"),
    [("1x3x1", "2x1x2", 0), ("1x1x3", "1x2x1", 1), ("2x1x1", "1x2x2", 1)],
)
def test_a_checkpoint_goes_on_under_another_layout(
    before: str, after: str, zero: int, tmp_path: Path
) -> None:
    unbroken = run_on(Grid.parse(before), saved, folder=tmp_path)[0]
    found = run_on(Grid.parse(after), loaded, folder=tmp_path, zero=zero)[0]
    for name in NAMES:
        assert error(found[name], unbroken[name]) < 1e-10, name


class Head(nn.Module):
    """A matrix that another unit has too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def each_tied(topology: Topology) -> dict[str, Tensors]:
    return {name: tied(topology, name) for name in NAMES}


def tied(topology: Topology, name: str) -> Tensors:
    """The first and the last unit share a matrix; the one between is frozen, so a rank is idle."""
    with torch.device("meta"):
        weight = nn.Parameter(torch.empty(8, 8))
        frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        model = nn.Sequential(Head(weight), frozen, Head(weight))
    mine = engine(
        topology, model, optimizer=OPTIMIZERS[name][0], partition=[1, 2][: topology.pp.size - 1]
    )
    train(mine, 3)
    return mine.state_dict_whole()


def test_ties_and_ranks_without_anything_to_train() -> None:
    whole, *others = (run_on(grid, each_tied)[0] for grid in (Grid(), Grid(pp=3), Grid(dp=2)))
    for other in others:
        for name in NAMES:
            assert error(other[name], whole[name]) < 1e-12


def state_bytes(topology: Topology) -> list[Any]:
    found = []
    for name in NAMES:
        mine = ragged_engine(topology, name)
        before = predicted(mine.parts)
        ragged_steps(mine, range(1))
        assert memory(mine.parts) == before
        found.append(before.optimizer)
    return found


def test_the_state_takes_the_bytes_that_were_predicted() -> None:
    """Two averages for LAMB; for Adafactor of a matrix its rows and columns; one for Muon."""
    assert run_on(Grid(), state_bytes)[0] == [
        2 * 8 * 2 * (110 + 600 + 300 + 60 + 10 + 1),
        8 * 2 * (11 + 10 + 10 + 60 + 30 + 10 + 60 + 10 + 1),
        8 * 2 * (110 + 600 + 300 + 2 * (60 + 10 + 1)),
    ]


def test_the_recipe_gives_muon_what_lies_between_the_first_and_the_last_unit() -> None:
    sizes = ["model.vocab_size=32", "model.width=16", "model.num_heads=2", "topology.dp=1"]
    for name, keys in (("muon", ["muon"]), ("lamb", ["weight_decay"]), ("adafactor", ["d"])):
        config = settle(compose(f"optim.name={name}", *sizes), 1, 1, 1)
        with Topology.init() as topology:
            made = build_engine(config, topology, build_model(config, topology, None))
            optimizer = made.parts.optimizer
            assert isinstance(optimizer, WholeOptimizer)
            by_name = {each.held.name: each for each in optimizer.slices}
            assert all(key in options for options in optimizer.options for key in keys)
            x = torch.randint(32, (8, 16), generator=torch.Generator().manual_seed(0))
            losses = [made.train_step(x, x).loss for _ in range(8)]
            assert losses[-1] < losses[0]
        if name == "muon":
            for parameter, each in by_name.items():
                unit = parameter.split(".")[0]
                inner = unit not in ("0", str(len(made.parts.units) - 1)) and len(each.shape) == 2
                assert ("momentum_buffer" in each.state) == inner, parameter


class Cube(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x


REFUSED: list[tuple[str, Any, Any]] = [
    (
        r"0\.weight has shape \[2, 2, 2\]: Adafactor is built for .* two dims",
        torch.optim.Adafactor,
        None,
    ),
    (r"0\.weight has shape \[2, 2, 2\], but Muon .*: use parallel3d", torch.optim.Muon, None),
    (
        r"0\.weight has shape \[2, 2, 2\], but Muon .*: leave its group's muon None",
        Muon,
        lambda name, parameter: {"muon": True},
    ),
    (r"Lamb\(lr=-1.*none is negative", partial(Lamb, lr=-1), None),
    (r"adjust_lr_fn|Adjust learning rate", partial(Muon, adjust_lr_fn="mine"), None),
]


@pytest.mark.parametrize(("message", "optimizer", "groups"), REFUSED)
def test_what_a_rule_cannot_do_is_refused_by_name(
    message: str, optimizer: Any, groups: Any
) -> None:
    with Topology.init() as topology, pytest.raises(ValueError, match=message):
        engine(topology, nn.Sequential(Cube()), optimizer=optimizer, param_groups=groups)


def test_lamb_and_muon_take_no_step_of_their_own() -> None:
    for kind in (Lamb, Muon):
        with pytest.raises(RuntimeError, match="inside parallel3d.Engine only"):
            kind([nn.Parameter(torch.zeros(2, 2))]).step()


def test_torchs_own_muon_trains_matrices() -> None:
    with Topology.init() as topology, torch.device("cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(2)]).double()
        twin = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(2)]).double()
        twin.load_state_dict(model.state_dict())
        make = partial(torch.optim.Muon, lr=0.05)
        mine = engine(topology, model, optimizer=make)
        train(mine, 3)
        train_plainly(twin, 3, make)
        assert error(mine.state_dict_whole(), dict(twin.state_dict())) < 1e-12


def test_matrices_are_dealt_out_evenly() -> None:
    assert deal([5, 1, 1, 1, 2], 2) == [0, 1, 1, 1, 1]
    assert deal([1.0] * 5, 1) == [0] * 5
    assert sorted(deal([1.0] * 8, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_the_iteration_has_the_bits_of_torchs(shape: tuple[int, int]) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.Muon(
        [parameter], lr=1.0, momentum=0.0, nesterov=False, adjust_lr_fn="original"
    )
    parameter.grad = gradient
    optimizer.step()
    group = optimizer.param_groups[0]
    made = orthogonal(gradient, group["ns_coefficients"], group["ns_steps"], group["eps"])
    ratio = max(1, shape[0] / shape[1]) ** 0.5
    assert torch.equal(parameter.detach(), torch.zeros(shape).add_(made, alpha=-ratio))
