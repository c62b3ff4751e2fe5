"""Arguments that differ between ranks are refused on all of them, before anything rests on them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d import Grid, Topology
from tests.engine.cases import WIDTH, engine
from tests.world import run_on

SECOND: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"zero": 3}, "zero = 3 on rank 1, but 1 on rank 0: every rank must be given the same"),
    "precision": ({"precision": "bf16"}, "precision = 'bf16' on rank 1, but 'fp64' on rank 0"),
    "seed": ({"seed": 1}, "seed = 1 on rank 1, but 0 on rank 0"),
    "partition": ({"partition": [1]}, "partition = [1] on rank 1, but 'parameters' on rank 0"),
    "offload": (
        {"offload": {"optimizer": "cpu"}},
        "offload.optimizer = 'cpu' on rank 1, but 'none' on rank 0",
    ),
    "lr": ({"optimizer": partial(torch.optim.AdamW, lr=0.5)}, "lr=0.5"),
    "class": ({"optimizer": partial(torch.optim.SGD, lr=0.1)}, "optimizer = SGD(lr=0.1"),
    "broken": ({"optimizer": partial(torch.optim.AdamW, lr=-1.0)}, "optimizer = ValueError on"),
    "fp16": (
        {"precision": "fp64", "fp16": {"scale": 8.0}},
        "fp16.scale = 8.0 on rank 1, but None on rank 0",
    ),
    "kind": ({"max_bad_steps": -1}, "max_bad_steps = -1 is below 0"),
    "function": ({"lr_schedule": lambda step: 1.0}, "lr_schedule = a function on rank 1, but None"),
}


def told(topology: Topology) -> dict[str, str]:
    """What each difference is answered; the next engine works, for nothing was left half done."""
    found = {}
    for name, (options, _) in SECOND.items():
        with pytest.raises(ValueError) as caught:
            engine(topology, **(options if topology.rank else {}))
        found[name] = str(caught.value)
    other = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2 + topology.rank)])
    message = r"the model's parameter = 2\.weight .* on rank 1, but none on rank 0"
    with pytest.raises(ValueError, match=message):
        engine(topology, other)
    engine(topology, timeout=60.0 + topology.rank)
    return found


def test_a_difference_is_named_with_both_values_and_ranks_on_every_rank() -> None:
    for found in run_on(Grid(dp=2), told):
        for name, (_, message) in SECOND.items():
            assert message in found[name]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": "adamw"}, "optimizer = 'adamw' is not what makes an optimizer"),
        (
            {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)},
            "optimizer = SGD is not what makes an optimizer",
        ),
        ({"loss_fn": nn.MSELoss}, r"loss_fn = MSELoss is not a function: pass an object, nn\.MSE"),
        ({"loss_fn": None}, "loss_fn = None is not a function"),
    ],
)
def test_what_is_passed_as_something_else_is_told(given: dict[str, Any], message: str) -> None:
    with Topology.init() as topology, pytest.raises(ValueError, match=message):
        engine(topology, **given)


def test_a_topology_that_is_none_is_told() -> None:
    with Topology.init() as topology:
        mine = engine(topology)
        for args in ((mine.parts.units[0].module, None), ("model", topology)):
            with pytest.raises(ValueError, match="is not a (Topology|module)"):
                type(mine)(*args, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD)  # type: ignore[arg-type]
