"""One rank stands still in a run of the recipe: every rank ends, and the report says why."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.start import ROOT, Finished, start

# The user's own model and data: on rank 1 one of them stands still.
MINE = """
import os
import time
import torch
from torch import nn

RANK, WHERE = os.environ["RANK"], os.environ["WHERE"]

def stall(where):
    if RANK == "1" and where == WHERE:
        time.sleep(1000)

class Unit(nn.Linear):
    def forward(self, x):
        stall("forward")
        return super().forward(x)

def build(topology, width):
    return nn.Sequential(*[Unit(width, width) for _ in range(4)])

class Data:
    vocab_size = None

    def __init__(self, seed):
        pass

    def train(self, step, slots):
        if step == 1:
            stall("data")
        return torch.ones(len(slots), 4), torch.ones(len(slots), 4)

    def validation(self, step, slots):
        stall("validation")
        return torch.ones(len(slots), 4), torch.ones(len(slots), 4)
"""
ARGUMENTS = (
    "--config-dir=conf model=mine data=mine loss._target_=torch.nn.MSELoss train.steps=4 name=a "
    "pipeline.num_microbatches=2 train.eval_every=2 train.timeout=4 log.wandb.mode=disabled "
    "topology.pp=2"
).split()
WHAT = {
    "forward": r"rank 1 .* computes 1F0, the forward of microbatch 0, since .* in stall",
    "data": r"rank 1 .* is in data loading since .* mine\.py:\d+ in stall",
    "validation": r"rank 1 .* is in loading of validation data since .* mine\.py:\d+ in stall",
}


def run(folder: Path) -> Finished:
    groups = {
        "model": "{_target_: mine.build, width: 4}",
        "data": "{_target_: mine.Data, path: null, seq_len: 1, global_batch_size: 8, "
        "microbatch_size: null, workers: 0}",
    }
    for group, text in groups.items():
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / "mine.yaml").write_text(text)
    (folder / "mine.py").write_text(MINE)
    argv = [str(ROOT / "recipes" / "pretrain.py"), *ARGUMENTS]
    env = {"WHERE": folder.name, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    return start(argv, 2, env=env, cwd=folder, timeout=60)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stalled")


@pytest.fixture(scope="module")
def stalled(root: Path) -> dict[str, Finished]:
    with ThreadPoolExecutor(len(WHAT)) as worlds:
        return dict(zip(WHAT, worlds.map(lambda where: run(root / where), WHAT), strict=True))


@pytest.mark.parametrize("where", WHAT)
def test_every_rank_ends_and_the_report_says_who_waits_for_whom_and_why(
    stalled: dict[str, Finished], where: str
) -> None:
    ended = stalled[where]
    assert ended.codes == (1, 1), ended.output
    assert re.search(rf"rank 0 .* waits .* rank 1 .*\n.*cause: .*{WHAT[where]}", ended.output), (
        ended.output
    )


def test_the_launchers_summary_says_why(stalled: dict[str, Finished], root: Path) -> None:
    failure = ProcessFailure(0, 1, 1, str(root / "forward" / "error.json"))
    summary = ChildFailedError("recipes/pretrain.py", {0: failure}).format_msg()
    assert re.search(rf"traceback : .*\n.*\n.*cause: .*{WHAT['forward']}", summary), summary
