"""Going back in a run, and runs whose validation has no number."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallel3d.checkpoint.retention import list_checkpoints, step_of
from parallel3d.config import compose, settle
from parallel3d.job import claimed
from parallel3d.topology import Topology
from parallel3d.train import train


def build(topology: Topology, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


class Sums:
    def train(self, step: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        x = torch.tensor([[step, slot, 1.0] for slot in slots]) / 10
        return x, x.sum(1, keepdim=True)

    def validation(self, step: int, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        x, target = self.train(step, slots)
        return x, target * math.nan


def run(root: Path, steps: int, *overrides: str) -> list[int]:
    """Train; the steps of the checkpoints that there are then."""
    own = [f"model._target_={__name__}.build", f"data._target_={__name__}.Sums"]
    fixed = ["name=a", "loss._target_=torch.nn.MSELoss", "train.eval_every=0", f"run_root={root}"]
    keys = [*own, *fixed, f"train.steps={steps}", "checkpoint.keep=9", *overrides]
    config = settle(compose(*keys), 1, 1, 1)
    with Topology.init() as topology, claimed(config, "a", topology.world) as folder:
        train(config, topology, folder)
    return [step_of(path) for path in list_checkpoints(folder / "checkpoints")]


def _lines(root: Path) -> list[str]:
    return (root / "a/metrics.jsonl").read_text().splitlines()


def steps_of(root: Path) -> list[int]:
    return [json.loads(line)["step"] for line in _lines(root)]


def test_a_run_that_goes_back_leaves_what_came_later(tmp_path: Path) -> None:
    assert run(tmp_path, 6, "checkpoint.every=2") == [2, 4, 6]
    back = f"checkpoint.resume={tmp_path}/a/checkpoints/step-00000002"
    assert run(tmp_path, 5, "checkpoint.every=0", back) == [2, 5]
    assert run(tmp_path, 7, "checkpoint.every=0", "checkpoint.resume=auto") == [2, 5, 7]
    assert steps_of(tmp_path) == list(range(1, 8))


def test_a_checkpoint_of_another_run_starts_a_new_run_only(tmp_path: Path) -> None:
    run(tmp_path, 2, "checkpoint.every=2")
    other = f"checkpoint.resume={tmp_path}/a/checkpoints/step-00000002"
    assert run(tmp_path, 3, "name=b", other) == [3]
    with pytest.raises(ValueError, match="is not of the run .*b, which exists already"):
        run(tmp_path, 4, "name=b", other)


def test_a_run_is_no_checkpoint_and_the_message_says_what_is(tmp_path: Path) -> None:
    run(tmp_path, 1)
    with pytest.raises(ValueError, match="is a run: name one of its checkpoints"):
        run(tmp_path, 2, f"checkpoint.resume={tmp_path}/a", "name=c")


def test_a_validation_loss_that_is_no_number_is_logged_as_null_and_saved(tmp_path: Path) -> None:
    every = ("train.eval_every=1", "checkpoint.every=1")
    assert run(tmp_path, 2, *every) == [1, 2]
    rows = [json.loads(line) for line in _lines(tmp_path)]
    assert [row["val_loss"] for row in rows] == [None, None]


def test_a_second_job_in_a_run_is_told(tmp_path: Path) -> None:
    config = compose("name=a", f"run_root={tmp_path}", "checkpoint.resume=auto")
    with Topology.init() as topology, claimed(config, "a", topology.world):
        with (
            pytest.raises(ValueError, match="another job is running"),
            claimed(config, "a", topology.world),
        ):
            raise AssertionError
        assert (tmp_path / "a").is_dir()
