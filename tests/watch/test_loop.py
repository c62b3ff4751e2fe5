"""A rank is killed between the phases of a run: the others' error names it all the same."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.start import ROOT, start

MINE = """
import os
import signal
import torch
from torch import nn
from parallel3d import train

def build(topology, width):
    if topology.rank == 1:
        setattr(train, os.environ["AT"], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4))

class Data:
    def train(self, step, slots):
        return torch.ones(len(slots), 4), torch.ones(len(slots), 4)

    validation = train
"""
ARGUMENTS = (
    "model._target_=mine.build data._target_=mine.Data loss._target_=torch.nn.MSELoss name=a "
    "train.timeout=30 log.wandb.mode=disabled topology.pp=2"
).split()


@pytest.mark.parametrize("at", ["places", "host_offset", "gather", "due"])
def test_one_that_is_killed_in_the_loop_is_named_by_the_others(at: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    script = str(ROOT / "recipes/pretrain.py")
    ended = start([script, *ARGUMENTS], 2, cwd=tmp_path, env={"AT": at})
    assert ended.codes == (1, -signal.SIGKILL), ended.output
    assert re.search(r"cause: .*rank 1 \(.*is gone", ended.output), ended.output
