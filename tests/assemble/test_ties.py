"""Ties by name and by object: what is refused, and what every rank starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import ColumnParallelLinear, Grid, RowParallelLinear, Topology
from parallel3d.assemble.model import units_of
from parallel3d.assemble.ties import shared_by, tie_by_name
from parallel3d.report import _sizes
from tests.engine.cases import engine, same
from tests.engine.cases import train as train_real
from tests.engine.tie_cases import build, engine_of, train, unequal_copies
from tests.world import RankFailed, run_on


def separate() -> nn.Sequential:
    """The model "three" with weights of their own in all three places."""
    model = build("three", None)
    for unit in (model[3], model[7]):
        for module in unit.modules():
            if "used" in vars(module):
                module.weight = nn.Parameter(torch.rand_like(module.weight))
    return model


NAMES = ("0.weight", "3.0.0.weight", "7.weight")


def by_name(topology: Topology, groups: Any) -> Any:
    """Numbers and weights of a model tied by name, and of one that is built with the ties."""
    tied = engine_of(topology, "three", "adamw", model=separate(), tied=groups)
    built = engine_of(topology, "three", "adamw", tied=None)
    return [(train(mine), mine.state_dict_whole()) for mine in (tied, built)]


@pytest.mark.parametrize(
    "groups",
    [[NAMES], [NAMES[::-1]], [NAMES[:2], NAMES[1:]], [["0.weight", "7.weight"], NAMES[1:]]],
)
def test_parameters_tied_by_name_are_those_of_a_model_built_with_one(groups: Any) -> None:
    (numbers, weights), (others, built) = run_on(Grid(pp=2), by_name, groups=groups)[0]
    assert numbers == others and same(weights, built)
    assert torch.equal(weights["0.weight"], weights["7.weight"])


def test_a_group_joins_everything_that_was_tied_before() -> None:
    a, b, c = (nn.Linear(2, 2) for _ in range(3))
    b.weight = c.weight
    units = units_of(nn.Sequential(a, b, c))
    tie_by_name(units, [("2.weight", "0.weight")])
    assert a.weight is b.weight is c.weight
    tie_by_name(units, [])
    assert b.bias is not c.bias


def misfits() -> nn.Sequential:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 2), nn.Linear(2, 2).double(), frozen)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (("0.weight", "1.wieght"), "tied names 1.wieght, which is no parameter .* 1.weight"),
        (("0.weight", "1.weight"), r"1.weight cannot be tied to 0.weight: shape \(2, 3\) is not"),
        (("2.weight", "0.weight"), "2.weight cannot be tied to 0.weight: dtype torch.float64"),
        (("0.weight", "3.weight"), "3.weight cannot be tied to 0.weight: requires_grad False is"),
        (("0.weight",), "tied has .* which is no group of two names"),
        ("0.weight", "tied has '0.weight', which is no group of two names"),
    ],
)
def test_names_that_cannot_be_tied_are_refused(group: Any, message: str) -> None:
    with Topology.init() as topology, pytest.raises(ValueError, match=message):
        engine(topology, misfits(), tied=[group])


def differently_cut(topology: Topology) -> str:
    with torch.device("meta"):
        column = ColumnParallelLinear(8, 8, axis=topology.tp)
        row = RowParallelLinear(8, 8, axis=topology.tp)
        other = nn.Linear(8, 4)
    row.weight = other.weight = column.weight
    with pytest.raises(ValueError) as caught:
        engine(topology, nn.Sequential(column, row, other))
    # Nothing was sent: the world goes on.
    train_real(engine(topology), 1)
    return str(caught.value)


def test_uses_that_cut_a_weight_in_different_ways_are_refused_by_both_names() -> None:
    texts = run_on(Grid(pp=2, tp=2), differently_cut)
    assert len(set(texts)) == 1
    assert "1.weight is tied to 0.weight, but lies on tp as Shard(dim=1" in texts[0]
    assert "Shard(dim=0" in texts[0]


def test_what_units_share_is_found_with_its_places() -> None:
    units = units_of(build("module", None))
    found = {each.owner: each for each in shared_by(units, [0, 0, 1, 1, 2, 2, 1, 0])}
    assert list(found) == ["0.weight", "1.linear.weight", "1.linear.bias", "1.scale"]
    assert found["0.weight"].holders == (0,)
    scale = found["1.scale"]
    assert scale.ranks == {1: 0, 2: 1, 6: 1} and scale.holders == (0, 1)
    assert scale.paths == {1: "scale", 2: "scale", 6: "scale"}


def starts(topology: Topology, name: str, by_init: bool) -> Any:
    """Whole values before any step, of a model that every rank has filled with its own; buffers."""
    torch.manual_seed(topology.rank)
    model = build(name, None)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(topology.rank)
    init = {"init": lambda name, tensor: tensor.normal_()} if by_init else {}
    mine = engine_of(topology, name, model=model, precision="bf16", **init)
    assert unequal_copies(mine) == []
    buffers = {
        f"{unit.name}.{path}": buffer.clone()
        for unit in mine.parts.units
        for path, buffer in unit.module.named_buffers()
    }
    return mine.state_dict_whole(), buffers


@pytest.mark.parametrize("by_init", [True, False])
@pytest.mark.parametrize("name", ["three", "frozen", "module"])
def test_every_use_starts_from_the_values_of_the_first_rank(name: str, by_init: bool) -> None:
    one, scales = run_on(Grid(), starts, name=name, by_init=by_init)[0]
    ranks = run_on(Grid(pp=2, dp=2), starts, name=name, by_init=by_init)
    ties = {"0.weight", "1.linear.weight", "1.linear.bias"} & one.keys()
    for key in one if by_init else ties:
        assert key in scales or torch.equal(ranks[0][0][key], one[key]), key
    for _, buffers in ranks:
        for key, buffer in buffers.items():
            assert torch.equal(buffer, scales[key]), key


class Drawn(nn.Module):
    """Has a weight, a bias that is drawn after it, and a buffer drawn last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(n)) for n in (8, 8))
        self.register_buffer("noise", torch.empty(8))

    def reset_parameters(self) -> None:
        for tensor in (self.weight, self.bias, self.noise):
            nn.init.normal_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias * self.noise


def on_meta(topology: Topology) -> Any:
    with torch.device("meta"):
        units = [Drawn() for _ in range(4)]
    units[3].weight = units[0].weight
    mine = engine(topology, nn.Sequential(*units), partition="uniform")
    return mine.state_dict_whole(), train_real(mine, 2)


def test_what_is_drawn_on_meta_does_not_depend_on_where_the_uses_lie() -> None:
    (one, numbers), (two, others) = (run_on(Grid(pp=p), on_meta)[0] for p in (1, 2))
    assert same(one, two) and numbers == others
    assert torch.equal(one["0.weight"], one["3.weight"])
    assert not torch.equal(one["0.bias"], one["3.bias"])


def counts(topology: Topology) -> tuple[int, int]:
    """Elements that the start tells of, and those of the norm's slots."""
    mine = engine_of(topology, "three", schedule="zbv")
    return sum(_sizes(mine)), mine.parts.slots.count


def test_a_tied_parameter_counts_once_on_any_number_of_ranks() -> None:
    model = build("three", None)
    expected = sum(parameter.numel() for parameter in model.parameters())
    for pp in (1, 2, 4):
        found = run_on(Grid(pp=pp), counts)
        assert set(found) == {(expected, len(list(model.parameters())))}


class Calls(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x


def count(topology: Topology, folder: Path) -> dict[str, Tensor]:
    calls, layers = Calls(), [nn.Linear(8, 8) for _ in range(2)]
    mine = engine(topology, nn.Sequential(calls, *layers, calls), partition="uniform")
    mine.save(folder)
    mine.load(folder)  # which writes the buffer, as it may
    train_real(mine, 1)
    return mine.state_dict_whole()


def test_a_shared_buffer_may_change_only_where_every_use_sees_it(tmp_path: Path) -> None:
    assert run_on(Grid(), count, folder=tmp_path / "one")[0]["3.count"] == 4
    with pytest.raises(RankFailed, match="3.count was changed by its unit, but units on other"):
        run_on(Grid(pp=2), count, folder=tmp_path / "two")
