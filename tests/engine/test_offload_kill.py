"""Runs with offload that are killed again and again, and come to the same end."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from parallel3d import Grid, Topology
from tests.engine.cases import blocks, same, train
from tests.engine.offload_cases import made
from tests.world import RankFailed, run_on

STEPS, EVERY, KILLS = 40, 3, 10


def run_to_the_end(topology: Topology, folder: Path, place: Any, delay: float) -> Any:
    """From the last checkpoint on, saving as it goes, unless ``delay`` seconds end it before."""
    mine = made(topology, blocks(topology, 2), offload=place, precision="bf16")
    saved = sorted(path for path in folder.glob("step-*") if path.suffix == "")
    if saved:
        mine.load(saved[-1])
    started = mine.step
    if delay:
        signal.setitimer(signal.ITIMER_REAL, delay)  # nobody handles it: the process is gone
    while mine.step < STEPS:
        train(mine, [mine.step])
        if mine.step % EVERY == 0:
            mine.save(folder / f"step-{mine.step:03d}")
    signal.setitimer(signal.ITIMER_REAL, 0)
    return started, mine.state_dict_whole()


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(
    where: str, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    place = {"optimizer": where, **({"path": str(scratch)} if where == "disk" else {})}
    (tmp_path / "whole").mkdir()
    ((_, expected),) = run_on(
        Grid(), run_to_the_end, folder=tmp_path / "whole", place=None, delay=0
    )
    folder, kills, random_moment = tmp_path / "killed", 0, random.Random(where)
    folder.mkdir()
    for _ in range(KILLS // 2):
        delay = random_moment.uniform(0.002, 0.08)
        try:
            run_on(Grid(), run_to_the_end, folder=folder, place=place, delay=delay)
        except RankFailed as failure:
            assert "exit code -14" in str(failure)
            kills += 1
    ((started, found),) = run_on(Grid(), run_to_the_end, folder=folder, place=place, delay=0)
    assert kills >= 3 and same(found, expected)
    assert where == "cpu" or len(list(scratch.iterdir())) == 1
    print(f"{where}: killed {kills} times, at last from step {started}")
