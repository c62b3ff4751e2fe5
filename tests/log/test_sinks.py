import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel3d.log.sinks import Log, WandbSettings

from .records import FakeWandb, record, wandb_history, wandb_records

CONFIG = {"model": {"width": 8}, "seed": 0}


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log(folder: Path, mode: str = "disabled", **changes: Any) -> Log:
    arguments = {"is_rank0": True, "num_steps": 9, "wandb": WandbSettings(mode=mode)}
    return Log(folder, CONFIG, **(arguments | changes))


def test_an_evaluation_stands_in_the_line_of_its_step(tmp_path: Path) -> None:
    run = log(tmp_path)
    for step in (1, 2, 3):
        if step == 2:
            run.evaluated(2, 1.25)
        run.step(record(step))
    run.close()
    assert [row.get("val_loss") for row in rows(tmp_path)] == [None, 1.25, None]
    assert ["val_loss" in row for row in rows(tmp_path)] == [False, True, False]


def test_an_evaluation_of_another_step_is_an_error(tmp_path: Path) -> None:
    run = log(tmp_path)
    run.step(record(2))
    run.evaluated(2, 1.25)
    with pytest.raises(ValueError, match=r"evaluated\(2, ...\) came before .* step 3"):
        run.step(record(3))
    run.close()


def test_a_saved_step_stands_in_the_file_before_its_checkpoint_can(tmp_path: Path) -> None:
    run = log(tmp_path)
    run.evaluated(1, 1.25)
    run.step(record(1))
    assert rows(tmp_path) == [record(1, val_loss=1.25).row()]
    run.close()


@pytest.mark.report("Lightning-AI/pytorch-lightning#11380")
@pytest.mark.report("huggingface/pytorch-image-models#1309")
@pytest.mark.report("Emerge-Lab/PufferDrive#468")
def test_of_eight_ranks_on_two_nodes_one_writes(
    fake: FakeWandb,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % 4))
        run = log(tmp_path, mode="offline", is_rank0=rank == 0)
        run.evaluated(1, 1.0)
        run.step(record(1))
        run.close()
    assert (len(fake.inits), len(fake.rows), len(fake.exit_codes)) == (1, 1, 1)
    assert len(rows(tmp_path)) == 1
    assert capsys.readouterr().out.count("step 1/9") == 1


def test_wandb_gets_the_row_of_the_file_and_what_is_its_alone(
    fake: FakeWandb, tmp_path: Path
) -> None:
    run = log(tmp_path, mode="offline")
    run.evaluated(1, 1.25)
    run.step(record(1, loss=math.nan), {"stage/0/memory": 3.0})
    run.close()
    run.close()
    ((_, sent),) = fake.rows
    assert sent == {**rows(tmp_path)[0], "stage/0/memory": 3.0}
    assert fake.exit_codes == [0]


def test_without_wandb_its_package_is_not_imported(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from parallel3d.log.sinks import Log\n"
        "Log(Path(sys.argv[1]), {}, is_rank0=True, num_steps=1).close()\n"
        "assert not {'wandb', 'omegaconf', 'hydra'} & set(sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=env)
    assert not (tmp_path / "wandb").exists()


@pytest.fixture
def wandb_server(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A W&B server that counts who calls; W&B's own folders lie apart."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
            monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path_factory.mktemp(name)))
        yield server


JOB = """
import math, sys
from pathlib import Path
from parallel3d.log.sinks import Log, WandbSettings
from tests.log.records import record

folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
offline = WandbSettings(mode="offline")
log = Log(folder, {}, is_rank0=True, num_steps=9, wandb=offline, resume_step=first - 1)
for step in range(first, last + 1):
    if step % 4 == 0:
        log.evaluated(step, 1.5)
    log.step(record(step, loss=math.nan if step == 6 else 0.1 * step + 0.2))
log.close()
"""


def test_offline_files_hold_what_the_lines_hold_over_a_resume(
    tmp_path: Path, wandb_server: socket.socket
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for first, last in ((1, 7), (5, 9)):
        command = [sys.executable, "-c", JOB, str(folder), str(first), str(last)]
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        assert done.stderr == ""

    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    ids = {m.run.run_id for f in files for m in wandb_records(f) if m.HasField("run")}
    assert len(ids) == 1
    history = [row for file in files for row in wandb_history(file)]
    assert [row["step"] for row in history] == [*range(1, 8), *range(5, 10)]
    assert [row["_step"] for row in history] == [*range(1, 8), *range(8, 13)]

    by_step = {row["step"]: row for row in history}  # the later attempt's where there are two
    assert [row["step"] for row in rows(folder)] == list(range(1, 10))
    for row in rows(folder):
        sent = by_step[row["step"]]
        assert {key: sent[key] for key in row} == row

    with pytest.raises(BlockingIOError):  # nobody has called
        wandb_server.accept()[0].close()
