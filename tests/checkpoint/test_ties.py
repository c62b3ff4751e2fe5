"""Checkpoints of models with ties: a tied parameter is in them once, and loads under any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parallel3d import Grid, Topology
from tests.engine.cases import error, same
from tests.engine.tie_cases import build, engine_of, train, unequal_copies
from tests.world import run_on

NAMES = ("three", "frozen", "module", "gpt")
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("1x1x1", {}),
    "two stages": ("2x1x1", {}),
    "eight stages in a V": ("4x1x1", {"schedule": "zbv", "zero": 0}),
    "data parallel": ("2x2x1", {}),
    "tensor parallel": ("2x1x2", {"zero": 0}),
}


def start(topology: Topology, folder: Path, options: dict[str, Any]) -> Any:
    """Two steps, a checkpoint, and two more, of each model."""
    found = {}
    for name in NAMES:
        mine = engine_of(topology, name, "adamw", **options)
        train(mine, 2)
        mine.save(folder / name)
        found[name] = mine.state_dict_whole(), train(mine, 2), mine.state_dict_whole()
    return found


def resume(topology: Topology, folder: Path, options: dict[str, Any]) -> Any:
    """The same two more of engines that have loaded it."""
    found = {}
    for name in NAMES:
        mine = engine_of(topology, name, "adamw", seed=9, **options)
        mine.load(folder / name)
        assert unequal_copies(mine) == []
        found[name] = mine.state_dict_whole(), train(mine, 2), mine.state_dict_whole()
    return found


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("two stages", "one rank"),
        ("one rank", "eight stages in a V"),
        ("eight stages in a V", "two stages"),
        ("data parallel", "tensor parallel"),
        ("tensor parallel", "two stages"),
    ],
)
def test_a_far_tie_goes_on_under_another_layout(saved: str, loaded: str, tmp_path: Path) -> None:
    (before, options), (after, others) = LAYOUTS[saved], LAYOUTS[loaded]
    first = run_on(Grid.parse(before), start, folder=tmp_path, options=options)[0]
    second = run_on(Grid.parse(after), resume, folder=tmp_path, options=others)[0]
    for name in NAMES:
        (at, numbers, weights), (again, others, reached) = first[name], second[name]
        assert same(again, at), name
        if before[1:] == after[1:]:
            assert numbers == others and same(reached, weights), name
        else:
            assert others == [pytest.approx(pair, rel=1e-11) for pair in numbers]
            assert error(reached, weights) < 1e-10


@pytest.mark.parametrize("layout", ["two stages", "eight stages in a V", "tensor parallel"])
def test_a_tied_parameter_is_saved_once_under_the_name_of_its_first_use(
    layout: str, tmp_path: Path
) -> None:
    grid, options = LAYOUTS[layout]
    run_on(Grid.parse(grid), start, folder=tmp_path, options=options)
    for name in NAMES:
        model = build(name, None)
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())["tensors"]
        kept = {f"weight/{key}" for key, _ in model.named_parameters()}
        assert {key for key in manifest if key.startswith("weight/")} == kept
        trained = {key for key, p in model.named_parameters() if p.requires_grad}
        for kind in ("exp_avg", "exp_avg_sq"):
            assert {key for key in manifest if key.startswith(f"{kind}/")} == {
                f"{kind}/{key}" for key in trained
            }
