from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from parallel3d.config import compose
from parallel3d.topology import Grid
from tests.data.corpus import write
from tools import main_job


@pytest.mark.parametrize(("val_loss", "code", "sign"), [(1.0, 0, "<"), (9.0, 1, ">=")])
def test_the_end_compares_with_the_unigram_entropy_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], val_loss: float, code: int, sign: str
) -> None:
    corpus = write(tmp_path / "corpus", [range(256)] * 100, 256)
    given = ["name=a", f"run_root={tmp_path}", f"data.path={corpus}", "train.steps=3"]
    (tmp_path / "a").mkdir()
    rows = [{"step": 1, "val_loss": 9.0}, {"step": 2}, {"step": 3, "val_loss": val_loss}]
    (tmp_path / "a/metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main_job.report(compose(*given), tmp_path / "a", 4, given) == code
    said = capsys.readouterr().out
    assert f"validation loss {val_loss:.3f} {sign} 5.5" in said  # ln 256 = 5.545
    assert f"python recipes/generate.py run={tmp_path}/a 'prompt=def '" in said
    assert "--nproc-per-node 4 recipes/pretrain.py name=a" in said
    assert "checkpoint.resume=auto train.steps=6" in said


def test_each_number_of_ranks_has_a_layout_of_that_size() -> None:
    for ranks, layout in main_job.LAYOUTS.items():
        degrees = compose(*layout).topology
        assert Grid.infer(ranks, degrees.pp, degrees.dp, degrees.tp).dp == 1


@pytest.mark.parametrize(("devices", "ranks"), [(0, 4), (1, 1), (3, 3), (8, 4)])
def test_there_are_as_many_ranks_as_devices_and_four_without(
    monkeypatch: pytest.MonkeyPatch, devices: int, ranks: int
) -> None:
    started: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(main_job, "train", lambda *call: started.append(call) or 7)
    assert main_job.main(["seed=1"]) == 7
    assert started[0][0] == ranks
    assert started[0][1][-1] == "seed=1"
