"""The proof of sound models, of a user's own, and what it says when a layout cannot be run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest

from parallel3d.topology import Grid
from parallel3d.verify import Case, RankError, Row, verify
from parallel3d.verify.proof import prove
from parallel3d.verify.trace import Setting
from tests.verify import subjects
from tests.verify.subjects import OWN, SUBJECTS

# Models beside those of the covering set: grouped heads, whole outputs, parameters of every kind.
COVERING = {
    "llama": [
        Case(Grid(2, 2, 1)),
        Case(Grid(2, 2, 1), 0, "gpipe", "full"),
        Case(Grid(1, 2, 1), 1, "interleaved", num_chunks=3),
        Case(Grid(1, 2, 1), 0, "zbv"),
    ],
    "own": [Case(Grid(2, 2, 1)), Case(Grid(2, 2, 1), 0, "gpipe", "full"), Case(Grid(1, 2, 1), 0)],
    "mlp": [Case(Grid(1, 2, 2)), Case(Grid(2, 2, 2), 0, "gpipe"), Case(Grid(1, 2, 2), 0)],
}


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("name", SUBJECTS)
def test_models_keep_every_promise(name: str) -> None:
    rows = list(prove(SUBJECTS[name], COVERING[name], Setting(), 1e-12))
    assert [row.case for row in rows] == COVERING[name]
    assert [row.failures for row in rows] == [[]] * len(rows)
    assert [row.bits for row in rows] == [None] + [""] * (len(rows) - 1)


def test_a_model_of_ones_own_is_proved_and_rows_come_as_they_are_done() -> None:
    seen: list[Row] = []
    layouts = ["1x1x1", "1x1x2"]
    rows = verify(**OWN, layouts=layouts, steps=2, num_microbatches=3, report=seen.append)
    assert all(row.passes for row in rows) and seen == rows
    assert [str(row.case.grid) for row in rows] == layouts
    assert set(rows[0].cells) == {"loss", "gradient", "norm", "sgd", "adamw"}


def test_at_tolerance_0_a_cut_layout_fails_and_names_a_parameter() -> None:
    (row,) = verify(**OWN, layouts=["1x1x2"], tolerance=0)
    assert not row.passes
    assert row.failures[0].startswith("gradient of 0.norm.bias is ")


def test_a_reference_with_other_names_is_refused() -> None:
    with pytest.raises(RankError, match=r"build and reference differ in 0\.bias, 0\.down\.bias"):
        verify(**{**OWN, "reference": subjects.other_reference}, layouts=["1x1x1"])


def test_a_rank_that_raises_ends_the_proof_with_its_own_error() -> None:
    with pytest.raises(RankError, match="rank 1 (?s:.*)RuntimeError: this rank fails") as raised:
        verify(**{**OWN, "build": subjects.failing_build}, layouts=["1x2x1"])
    assert isinstance(raised.value.error, RuntimeError)


def test_a_rank_that_ends_without_a_word_ends_the_proof() -> None:
    with pytest.raises(RankError, match="rank 1 "):
        verify(**{**OWN, "build": subjects.ending_build}, layouts=["1x2x1"])
