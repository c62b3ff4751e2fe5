"""The proof sees faults: each mutation breaks the columns that it must, and names a parameter."""

from __future__ import annotations

from functools import cache

import pytest

from parallel3d.topology import Grid
from parallel3d.verify import Case, Row
from parallel3d.verify.proof import judge, plainly
from parallel3d.verify.ranks import run
from parallel3d.verify.trace import Setting
from tests.verify.mutations import MUTATIONS, traces
from tests.verify.subjects import GPT, GPT_TIED


@cache
def rows(grid: Grid, tied: bool = False) -> dict[str, Row]:
    """Of the package as it is, under '', and under each mutation of a layout; in one world."""
    subject = GPT_TIED if tied else GPT
    names = [name for name, m in MUTATIONS.items() if (m.grid, m.tied) == (grid, tied)]
    ((setting, true),) = run(Grid(), plainly, subject, Setting(steps=2))
    sound, *broken = run(grid, traces, subject, setting, names)
    case = Case(grid)
    found = {"": judge(case, sound, true, sound, 1e-12)}
    for name, trace in zip(names, broken, strict=True):
        found[name] = judge(case, trace, true, sound, 1e-12)
    return found


@pytest.mark.parametrize(("grid", "tied"), {(m.grid, m.tied): 0 for m in MUTATIONS.values()})
def test_without_a_mutation_every_promise_is_kept(grid: Grid, tied: bool) -> None:
    row = rows(grid, tied)[""]
    assert row.passes and row.failures == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_breaks_its_columns(name: str) -> None:
    mutation = MUTATIONS[name]
    row = rows(mutation.grid, mutation.tied)[name]
    broken = {column for column, cell in row.cells.items() if not cell.passes}
    broken |= {"copies"} if row.unequal_copies else set()
    assert not row.passes
    assert row.bits, "a case is compared in bits with the sound one"
    assert broken - {"copies"} == set(mutation.columns.split()) - {"copies"}
    assert "copies" in broken or "copies" not in mutation.columns
    if mutation.columns:
        assert f" of {mutation.parameter}" in row.failures[0]
