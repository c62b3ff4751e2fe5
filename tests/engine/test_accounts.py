"""What a step sends, by the ledger, against what it should on paper and by the law of its stage."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import cross_entropy

from parallel3d import Engine, Grid, Topology
from parallel3d.assemble.accounts import Account, account
from parallel3d.zero.flat import ALIGNMENT
from tests.engine.cases import BATCH, SGD, WIDTH, batch, blocks, engine, share
from tests.engine.tie_cases import ends, three
from tests.world import run_on

UNITS, MICROBATCHES = 4, 2
UNIT = 512 * 8  # bytes of a block, padded
EVERYTHING, SOME, NOTHING = 2**28, 2 * UNIT, 0
CASES: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 1, "reduce_dtype": "bf16"},
    *({"zero": 2, "zero_reduce": reduce} for reduce in ("each", "last")),
    *(
        {"zero": 3, "zero_reduce": reduce, "gather_budget": budget}
        for reduce in ("each", "last")
        for budget in (EVERYTHING, SOME, NOTHING)
    ),
]


class Counted(NamedTuple):
    """Of one case on one rank: bytes by the ledger, the account, and elements with padding."""

    ledger: dict[str, int]
    account: Account
    elements: int
    parameters: int


def count(of: Engine) -> Counted:
    """Of the third step: by then receives are posted early, and shapes are known."""
    data = share(of.topology, *batch(0, BATCH * of.topology.dp.size, torch.float64))
    for _ in range(3):
        of.parts.ledger.reset()
        of.train_step(*data)
    flats = of.parts.shards.trained()
    slots = [slot for flat in flats for slot in flat.slots]
    elements = sum(flat.length for flat in flats)
    parameters = sum(slot.stop - slot.start for slot in slots)
    return Counted(of.parts.ledger.bytes(), account(of.parts), elements, parameters)


def count_each(topology: Topology, cases: list[dict[str, Any]]) -> list[Counted]:
    return [count(engine(topology, blocks(topology, UNITS), optimizer=SGD, **c)) for c in cases]


def law(case: dict[str, Any]) -> float:
    """How often a step sends each element of gradients and values, by ``(d - 1) / d``."""
    stage, m = case["zero"], MICROBATCHES if case.get("zero_reduce") == "each" else 1
    if stage == 3 and case["gather_budget"] == NOTHING:
        # Each unit for each forward and backward, but for those at which the order turns around.
        return m + (2 * MICROBATCHES * UNITS - (2 * MICROBATCHES - 1)) / UNITS
    return m * (1 / 4 if "reduce_dtype" in case else 1) + 1


@pytest.mark.parametrize("layout", ["1x2x1", "1x4x1", "2x2x1", "1x2x2"])
def test_bytes_of_a_step_are_as_on_paper_and_by_the_law_of_the_stage(layout: str) -> None:
    grid = Grid.parse(layout)
    d, t, units = grid.dp, grid.tp, UNITS // grid.pp
    message = BATCH // MICROBATCHES * WIDTH * 8
    for rank, found in enumerate(run_on(grid, count_each, cases=CASES)):
        first = grid.coordinates(rank)[0] == 0
        for case, (ledger, paper, elements, parameters) in zip(CASES, found, strict=True):
            where = rank, case
            assert 0 <= elements - parameters < units * ALIGNMENT * (6 + d), where
            dp = ledger["dp"] - 2 * 8 * (d - 1) // d  # without the count of items
            assert dp == paper.sent.values + paper.sent.gradients, where
            if grid.pp == 1 and case.get("gather_budget") != SOME:
                assert dp == law(case) * elements * 8 * (d - 1) / d, where
            # One border, a message each way; the first stage says which shapes will come.
            pp = MICROBATCHES * (message + 8 * first) if grid.pp > 1 else 0
            assert ledger.get("pp", 0) == pp, where
            # Of a block an all-reduce in forward, and one in backward.
            tp = 2 * MICROBATCHES * units * 2 * message * (t - 1) // t
            assert ledger.get("tp", 0) == tp, where


HYBRID: list[dict[str, Any]] = [
    {"zero": 1, "shard_size": 2},
    {"zero": 2, "shard_size": 2, "reduce_dtype": "bf16"},
    {"zero": 3, "shard_size": 2, "gather_budget": NOTHING},
    {"zero": 3, "shard_size": 1},
]


def test_bytes_of_shards_with_replicas_are_as_on_paper() -> None:
    for found in run_on(4, count_each, cases=HYBRID):
        for case, (ledger, paper, *_) in zip(HYBRID, found, strict=True):
            dp = ledger["dp"] - 2 * 8 * 3 // 4
            assert dp == paper.sent.values + paper.sent.gradients, case
        once = found[0].ledger["dp"] - 12
        # Over 2 of a shard twice half, over 2 replicas twice half of the shard.
        assert once == found[0].elements * 8 * (1 / 2 + 1 / 2 + 1 / 2)


def ties(topology: Topology, zero: int) -> list[tuple[int, int, int, int]]:
    """Of models with a tie: bytes of gradients sent over pp, and over dp, each also on paper."""
    found = []
    for build, schedule in ((ends, "1f1b"), (three, "zbv")):
        of = engine(topology, build(), zero=zero, schedule=schedule, optimizer=SGD, loss_fn=summed)
        of.parts.ledger.tracing = True
        x, target = share(topology, *(torch.arange(16).view(2, 8, 1) % 11))
        for _ in range(2):
            of.parts.ledger.reset()
            of.train_step(x, target)
        tied = [event for event in of.parts.ledger.trace if event.tag.startswith("tie ")]
        dp = of.parts.ledger.bytes()["dp"] - 2 * 8 // 2
        sent = account(of.parts).sent
        found.append(
            (sum(event.bytes for event in tied), sent.ties, dp, sent.values + sent.gradients)
        )
    return found


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


@pytest.mark.parametrize("zero", [1, 3])
def test_ties_send_what_they_send_on_paper(zero: int) -> None:
    ranks = run_on(Grid(pp=2, dp=2), ties, zero=zero)
    for found in ranks:
        for tied, on_paper, dp, values_and_gradients in found:
            assert tied == on_paper
            assert dp == values_and_gradients
    assert sum(tied for found in ranks for tied, *_ in found) > 0
