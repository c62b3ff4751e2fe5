"""Parameters of stage 3 in the host's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel3d import Engine, Grid, Topology
from parallel3d.memory import memory
from parallel3d.optim import Lamb
from tests.engine.cases import WIDTH, same, train
from tests.engine.offload_cases import made, places, run_of
from tests.world import run_on


def parameters_away(topology: Topology, folder: Path) -> None:
    """On the host beside each place of the optimizer: the same bits; each gather is a copy."""
    for case in ({"precision": "fp32"}, {"precision": "bf16", "gather_budget": 1}):
        options = {"zero": 3, **case}
        told, weights = run_of(made(topology, **options))
        for place in ({}, *places(folder)):
            mine = made(topology, offload={**place, "parameters": "cpu"}, **options)
            other, found = run_of(mine)
            assert other == told and same(found, weights), (case, place)
            shards = mine.parts.shards
            ledger = mine.parts.ledger
            ledger.reset()
            ledger.tracing = True
            train(mine, [6])
            shards.wait()
            held = sum(flat.shard.nbytes for flat in shards.held())
            gathered = sum(e.bytes for e in ledger.trace if e.kind == "all_gather")
            update = sum(flat.owned_grad.nbytes for flat in shards.trained()) if place else held
            assert ledger.bytes()["host"] == update + gathered, (case, place)
            assert gathered >= held and all(flat.bring is not None for flat in shards.held())


def test_parameters_on_the_host_change_no_bit_and_are_copied_once_a_gather(tmp_path: Path) -> None:
    run_on(Grid(dp=2), parameters_away, folder=tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_alone_trains_with_parameters_on_the_host(precision: str, tmp_path: Path) -> None:
    with Topology.init() as topology:
        told, weights = run_of(made(topology, zero=3, precision=precision))
        for place in ({}, *places(tmp_path)):
            away = made(
                topology, zero=3, precision=precision, offload={**place, "parameters": "cpu"}
            )
            other, found = run_of(away)
            assert other == told and same(found, weights), place
            assert all(flat.bring is not None for flat in away.parts.shards.held())
            assert memory(away.parts).parameters == 0


def frozen_away(topology: Topology, folder: Path) -> None:
    """Frozen parameters too, and checkpoints of both kinds."""

    def of(place: Any) -> Engine:
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]).double()
        model[1].requires_grad_(False)
        return made(topology, model, zero=3, offload=place)

    here, away = of(None), of({"parameters": "cpu"})
    assert train(away, 2) == train(here, 2)
    for mine, name in ((here, "here"), (away, "away")):
        mine.save(folder / name)
    for name in ("here", "away"):
        other = of({"parameters": "cpu", "optimizer": "cpu"})
        other.load(folder / name)
        assert same(other.state_dict_whole(), here.state_dict_whole())
    assert train(other, [2, 3]) == train(here, [2, 3])
    assert memory(away.parts).parameters == 0 < memory(here.parts).parameters
    assert memory(other.parts).optimizer == 0 < memory(away.parts).optimizer
    # Masters as wide as the values stay on the device with their update: 3 numbers each.
    trained = sum(flat.master.nbytes for flat in away.parts.shards.trained())
    assert memory(away.parts).optimizer >= 3 * trained


def whole_optimizer_away(topology: Topology) -> None:
    """Of an optimizer that sees whole parameters, the values only leave the device."""
    options: dict[str, Any] = {"optimizer": Lamb, "zero": 3, "precision": "bf16"}
    here, away = made(topology, **options), made(topology, offload={"parameters": "cpu"}, **options)
    assert run_of(away)[0] == run_of(here)[0]
    assert all(flat.bring is not None for flat in away.parts.shards.held())
    with pytest.raises(ValueError, match="offload.optimizer = cpu is for elementwise optimizers"):
        made(topology, offload={"optimizer": "cpu"}, **options)


def test_parameters_on_the_host_with_an_optimizer_that_is_not_elementwise() -> None:
    run_on(Grid(dp=2), whole_optimizer_away)


def test_frozen_parameters_and_checkpoints_with_parameters_on_the_host(tmp_path: Path) -> None:
    run_on(Grid(dp=2), frozen_away, folder=tmp_path)


def test_parameters_stay_with_stages_that_keep_them_whole() -> None:
    message = r"offload.parameters = cpu, but zero.stage = 2 .* set zero.stage=3, or"
    with Topology.init() as topology, pytest.raises(ValueError, match=message):
        made(topology, zero=2, offload={"parameters": "cpu"})
