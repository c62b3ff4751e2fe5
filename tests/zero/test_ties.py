from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel3d import Grid, Topology
from parallel3d.comm.ledger import Event
from parallel3d.placement import Replicate
from parallel3d.topology import Axis
from parallel3d.zero.flat import Flat, Held
from parallel3d.zero.ties import Tie, Ties
from tests.engine.cases import share
from tests.engine.tie_cases import batch, build, engine_of
from tests.world import run_on

PADDED = 128  # elements of a flat buffer of the 11 x 8 tied parameter, at dp 1 and 2


def traced_step(topology: Topology, name: str, **options: Any) -> tuple[list[Event], int]:
    """The events of the second step, and all bytes on pp that it counted."""
    mine = engine_of(topology, name, **options)
    mine.train_step(*share(topology, *batch(0)))
    ledger = mine.parts.ledger
    ledger.reset()
    ledger.tracing = True
    mine.train_step(*share(topology, *batch(1)))
    return ledger.trace, ledger.bytes()["pp"]


@pytest.mark.parametrize(
    ("layout", "options", "far"),
    [
        # Uses by holder, and how many others each use goes to.
        ("2x1x1", {}, [(2, 1), (1, 1)]),
        ("2x1x1", {"schedule": "zbv"}, [(2, 1), (1, 1)]),
        ("2x2x1", {}, [(2, 1), (2, 1), (1, 1), (1, 1)]),
        ("2x2x1", {"zero": 0, "precision": "fp32"}, [(2, 1), (2, 1), (1, 1), (1, 1)]),
        ("4x1x1", {}, [(1, 2), (1, 2), (0, 2), (1, 2)]),
    ],
)
def test_a_step_sends_each_use_of_a_tie_once_to_each_other_holder(
    layout: str, options: dict[str, Any], far: list[tuple[int, int]]
) -> None:
    grid = Grid.parse(layout)
    width = 4 if options.get("precision") == "fp32" else 8
    for rank, (trace, total) in enumerate(run_on(grid, traced_step, name="three", **options)):
        uses, others = far[rank]
        issued = [e for e in trace if e.tag == "tie 0.weight" and e.phase == "issue"]
        assert sum(event.bytes for event in issued) == uses * others * PADDED // grid.dp * width
        assert all(event.axis == "pp" and event.kind == "broadcast" for event in issued)
        assert len(issued) == (0 if uses == 0 else 3)
        assert total >= sum(event.bytes for event in issued)


@pytest.mark.parametrize("zero", [0, 1])
def test_ties_on_one_rank_send_nothing(zero: int) -> None:
    (trace, _), (other, _) = run_on(Grid(pp=2), tie_of_a_stage, zero=zero)
    assert not [event for event in (*trace, *other) if event.tag.startswith("tie")]


def tie_of_a_stage(topology: Topology, zero: int) -> tuple[list[Event], int]:
    """As ``traced_step``, where all uses lie in the first of two stages."""
    model = build("three", None).append(nn.Linear(11, 11))
    return traced_step(topology, "three", model=model, partition=[8], zero=zero)


def places(trace: list[Event], **wanted: str) -> list[int]:
    return [
        at
        for at, event in enumerate(trace)
        if all(getattr(event, key) == value for key, value in wanted.items())
    ]


def test_a_use_travels_beside_the_backward_of_the_units_before_it() -> None:
    (first, _), (last, _) = run_on(Grid(pp=2), traced_step, name="ends")
    for trace in (first, last):
        issued = places(trace, tag="tie 0.weight", phase="issue")
        waited = places(trace, tag="tie 0.weight", phase="wait")
        assert len(issued) == len(waited) == 2 and max(issued) < min(waited)
    # The head's, before the last message of its stage's last backward.
    sent = places(last, kind="send", tag="gradients", phase="issue")
    assert places(last, tag="tie 0.weight", phase="issue")[0] < sent[-1]


def test_uses_are_added_in_unit_order() -> None:
    flats = {}
    for unit, value in {0: 1.0, 3: 1e17, 5: -1e17}.items():
        parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        held = [Held(f"{unit}.w", parameter, Replicate(), 0, 0)]
        cpu = torch.device("cpu")
        of = flats.get(0)
        flats[unit] = Flat(held, Axis.single("dp"), cpu, dtype=torch.float64, stage=1, of=of)
        flats[unit].grad.fill_(value)
    ties = Ties([Tie("0.w", Axis.single("pp"), dict.fromkeys(flats, 0), flats)])
    ties.add_up()
    assert ties.ties[0].home is flats[0] and flats[0].grad.tolist() == [0.0] * 64
