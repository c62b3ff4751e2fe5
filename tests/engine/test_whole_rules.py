"""What the optimizers over whole parameters refuse, and what each does on one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import (
    Topology,
)
from parallel3d.build import build_engine, build_model
from parallel3d.config import compose, settle
from parallel3d.optim import Lamb, Muon
from parallel3d.optim.deal import dealt
from parallel3d.optim.newton_schulz import orthogonal
from parallel3d.optim.whole import WholeOptimizer
from tests.engine.cases import (
    engine,
    error,
    train,
    train_plainly,
)
from tests.engine.whole_cases import OPTIMIZERS


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_dtype": "bf16"}, r"state_dtype = bf16 is for elementwise .* leave it null"),
        (
            {"offload": {"optimizer": "cpu"}},
            r"offload\.optimizer = cpu is for .*AdamW, and (LAMB|Adafactor|Muon) is .* none",
        ),
    ],
)
def test_what_goes_by_units_is_refused(options: dict[str, Any], message: str) -> None:
    with Topology.init() as topology:
        for make, _ in OPTIMIZERS.values():
            with pytest.raises(ValueError, match=message):
                engine(topology, optimizer=make, **options)


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
    assert dealt([5, 1, 1, 1, 2], 2) == [0, 1, 1, 1, 1]
    assert dealt([1.0] * 5, 1) == [0] * 5
    assert sorted(dealt([1.0] * 8, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]


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
