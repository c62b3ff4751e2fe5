"""One rank is killed at a random place: every other ends with an error that names it."""

from __future__ import annotations

import random
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from parallel3d.launch import FIRST_PORT, NUM_PORTS
from parallel3d.topology import Grid
from tests.start import ROOT, Finished, start

SCRIPT = str(ROOT / "tests" / "watch" / "run.py")


class Case(NamedTuple):
    layout: str
    victim: int
    events: int


def cases() -> list[Case]:
    chance = random.Random(20)
    layouts = "2x1x1 1x2x1 1x1x2 2x2x1 2x1x2 1x2x2 4x1x1 1x4x1 2x1x1 2x2x1".split()
    sizes = [Grid.parse(layout).size for layout in layouts]
    return [
        Case(layout, chance.randrange(size), chance.randrange(300))
        for layout, size in zip(layouts, sizes, strict=True)
    ]


def run(case: Case, root: Path, init_method: str | None = None, how: str = "kill") -> Finished:
    folder = root / f"{case.layout}-{case.victim}-{case.events}"
    folder.mkdir()
    where = init_method or f"file://{folder}/rendezvous"
    argv = [SCRIPT, case.layout, str(case.victim), str(case.events), where, how]
    return start(argv, Grid.parse(case.layout).size, cwd=folder, timeout=60)


def check(case: Case, ended: Finished) -> None:
    assert ended.codes[case.victim] == -signal.SIGKILL, ended.output
    others = [code for rank, code in enumerate(ended.codes) if rank != case.victim]
    assert others == [1] * len(others), ended.output
    told = re.findall(rf"cause: .*rank {case.victim} \(.*is gone", ended.output)
    assert len(told) >= len(others), ended.output


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Finished]:
    root = tmp_path_factory.mktemp("killed")
    with ThreadPoolExecutor(3) as worlds:
        return dict(zip(cases(), worlds.map(lambda case: run(case, root), cases()), strict=True))


@pytest.mark.parametrize("case", cases(), ids=lambda case: "-".join(map(str, case)))
def test_every_other_rank_ends_and_is_told_who_is_gone(
    killed: dict[Case, Finished], case: Case
) -> None:
    check(case, killed[case])


@pytest.mark.report("Lightning-AI/pytorch-lightning#6430")
def test_an_error_of_one_rank_is_the_cause_that_the_others_tell(tmp_path: Path) -> None:
    ended = run(Case("2x1x2", 3, 120), tmp_path, how="raise")
    assert ended.codes == (1, 1, 1, 1), ended.output
    cause = r"cause: .*rank 3 \(pp 1, dp 0, tp 1\) failed .*: ValueError: planted, at .*in hear"
    assert len(re.findall(cause, ended.output)) >= 3, ended.output


def test_one_that_stands_still_outside_the_engine_hears_the_alarm_of_others(tmp_path: Path) -> None:
    ended = run(Case("1x3x1", 1, 0), tmp_path, how="sleep")
    assert ended.codes == (1, 1, 1), ended.output
    cause = r"cause: .*rank 1 .* is in the caller's code since .*, at .*run\.py:\d+ in main"
    assert len(re.findall(cause, ended.output)) == 3, ended.output


def test_the_death_of_the_rank_that_keeps_the_store_is_told_too(tmp_path: Path) -> None:
    ended = run(Case("1x3x1", 0, 90), tmp_path, f"tcp://127.0.0.1:{port()}")
    assert ended.codes == (-signal.SIGKILL, 1, 1), ended.output
    assert ended.output.count("rank 0 (pp 0, dp 0, tp 0) is gone, and with it the store") == 2


def port() -> int:
    """One that no outgoing connection can take meanwhile."""
    for number in random.sample(range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", number)):
                return number
    raise RuntimeError("no port is free")
