from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.start import ROOT, Finished, start, torchrun

# A model, data and a loss of the user's own, beside the run and not installed anywhere.
MINE = """
import os
import signal
import torch
from torch import nn

def build(topology, width):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

class Data:
    vocab_size = None

    def __init__(self, seed, signal_at=None):
        self.seed, self.signal_at = seed, signal_at

    def train(self, step, slots):
        if step == self.signal_at and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
        rows = [torch.Generator().manual_seed(1000 * step + slot) for slot in slots]
        x = torch.stack([torch.randn(4, generator=row) for row in rows])
        return x, x.sum(1, keepdim=True)

    validation = train
"""
GROUPS = {
    "model": "{_target_: mine.build, width: 8}",
    "data": "{_target_: mine.Data, path: null, seq_len: 1, global_batch_size: 8, "
    "microbatch_size: null, workers: 0}",
}
ARGUMENTS = (
    "--config-dir=conf",
    "model=mine",
    "data=mine",
    "loss._target_=torch.nn.MSELoss",
    "pipeline.num_microbatches=2",
    "train.eval_every=0",
    "train.steps=6",
    "log.wandb.mode=disabled",
    "name=a",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    for group, text in GROUPS.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "mine.yaml").write_text(text)
    return tmp_path


def pretrain(folder: Path, *arguments: str, **env: str) -> Finished:
    script = str(ROOT / "recipes/pretrain.py")
    return start([script, *ARGUMENTS, *arguments], 2, cwd=folder, env=env)


def steps(folder: Path, name: str = "a") -> list[int]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.report("facebookincubator/submitit#1615")
def test_signals_to_one_rank_save_the_same_step_on_all_and_the_next_start_goes_on(
    folder: Path,
) -> None:
    """Model, data and loss are the user's own, from the working directory."""
    marker = folder / "requeue"
    ended = pretrain(folder, "data.signal_at=3", PARALLEL3D_REQUEUE=str(marker))
    assert ended.codes == (0, 0), ended.output
    assert "checkpoint.resume=auto" in ended.output and marker.exists()
    stopped = len(steps(folder))
    assert stopped in (4, 5)  # the data of a step may be made a step ahead
    saved = [path.name for path in (folder / "runs/a/checkpoints").iterdir()]
    assert saved == [f"step-{stopped:08}"]
    ended = pretrain(folder, "checkpoint.resume=auto", "data.signal_at=3")
    assert ended.code == 0, ended.output
    assert steps(folder) == [1, 2, 3, 4, 5, 6]


def test_a_sweep_under_torchrun_trains_each_job(folder: Path) -> None:
    script = str(ROOT / "recipes/pretrain.py")
    jobs = ["name=a,b", "train.steps=2", "-m"]
    ended = torchrun([script, *ARGUMENTS, *jobs], 2, cwd=folder, timeout=60)
    assert ended.code == 0, ended.output
    assert steps(folder, "a") == steps(folder, "b") == [1, 2]


def test_a_file_of_deepspeed_is_told_once_and_its_batch_counts_the_ranks(folder: Path) -> None:
    fields = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 2, "warmup_num_steps": 1},
        },
    }
    (folder / "ds.json").write_text(json.dumps(fields))
    arguments = [each for each in ARGUMENTS if not each.startswith("train.steps")]
    script = str(ROOT / "recipes/pretrain.py")
    ended = start([script, *arguments, "deepspeed=ds.json"], 2, cwd=folder, env={})
    assert ended.code == 0, ended.output
    assert ended.output.count("train_micro_batch_size_per_gpu   ") == 1
    assert re.search(r"batch +12 = dp 2 x microbatches 2 x 3\n", ended.output)
    assert steps(folder) == [1, 2]
