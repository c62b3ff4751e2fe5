"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.start import ROOT, start, torchrun

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_library_example_trains_on_8_ranks_and_saves(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(BLOCKS[0])
    done = start(["example.py"], 8, cwd=tmp_path)
    assert done.code == 0, done.output
    assert (tmp_path / "ckpt" / "step-5" / "manifest.json").exists()


@pytest.mark.report("hydra-ecosystem/hydra#922")
def test_a_model_data_and_loss_of_ones_own_train_by_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BLOCKS[1])
    command = re.search(r"recipes/pretrain.py (topology.*?MSELoss)", README, re.DOTALL)
    assert command is not None
    keys = command[1].replace("\\", " ").split()
    extra = ["name=own", "train.steps=4", "train.eval_every=2", "log.wandb.mode=disabled"]
    done = torchrun([str(ROOT / "recipes" / "pretrain.py"), *keys, *extra], 4, cwd=tmp_path)
    assert done.code == 0, done.output
    assert len((tmp_path / "runs" / "own" / "metrics.jsonl").read_text().splitlines()) == 4


def test_commands_name_files_that_exist() -> None:
    for path in re.findall(r"(?:recipes|tools|conf)/[\w/]+\.(?:py|yaml|sbatch)", README):
        assert (ROOT / path).exists(), path
