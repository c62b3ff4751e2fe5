from __future__ import annotations

import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel3d.config import compose, settle
from parallel3d.data import prepare
from parallel3d.topology import Grid
from tests.start import ROOT, kill_tree, running

JOB = ROOT / "tools/main_job.py"
SMALL = [
    *["model.width=32", "model.num_layers=2", "model.ffn_width=64", "data.seq_len=16"],
    *["data.global_batch_size=8", "train.eval_every=6", "train.eval_batches=1", "optim.lr=1e-2"],
]
main_job = runpy.run_path(str(JOB))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text in which every letter says which comes next."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (folder / f"{number}.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 10)
    return prepare(f"text:{folder}", "bytes", folder / "tokens").folder


@pytest.fixture
def job(corpus: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts the main job in a folder of its own; nothing of it is left afterwards."""
    started: list[subprocess.Popen[str]] = []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, str(JOB), f"data.path={corpus}", *SMALL, *arguments],
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            kill_tree(process.pid)
        process.communicate()


def test_it_trains_below_the_unigram_entropy_and_says_how_to_go_on(
    job: Any, tmp_path: Path
) -> None:
    process = job("train.steps=30")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "\x1b" not in output and "\r" not in output
    assert "grid        pp 2 x dp 1 x tp 2" in output and " s left" in output
    assert "is below the unigram entropy of the corpus, 3.2" in output
    said = dict(line.split(maxsplit=1) for line in output.splitlines()[-3:] if " " in line)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"run folder  runs/{folder.name}" in output
    python, script, *keys = shlex.split(said["sample"])
    assert (Path(python), script) == (Path(sys.executable), str(ROOT / "recipes/generate.py"))
    assert keys == [f"run=runs/{folder.name}", "prompt=def ", "num_tokens=200", "temperature=0.8"]
    launcher, *_, last = shlex.split(said["continue"])
    assert Path(launcher).name == "torchrun" and last == "train.steps=60"
    overrides = [each for each in shlex.split(said["continue"]) if "=" in each]
    resumed = compose(*overrides, folder=ROOT / "conf")
    assert resumed.checkpoint.resume == "auto" and resumed.name == folder.name


def test_ctrl_c_saves_and_leaves_no_process(job: Any, tmp_path: Path) -> None:
    process = job("train.steps=100000", "name=stopped")
    assert any(line.startswith("step ") for line in process.stdout)
    children = main_job["children"]
    started = [launcher := children(process.pid)[0], *children(launcher)]
    assert len(started) == 5
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in output and "checkpoint.resume=auto" in output.splitlines()[-1]
    assert "stopped and saved; to continue:" in output
    assert list((tmp_path / "runs/stopped/checkpoints").glob("step-*/manifest.json"))
    deadline = time.monotonic() + 5
    while (left := [pid for pid in started if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_number_of_devices_has_a_layout_that_fits(ranks: int) -> None:
    config = compose("model=gpt_tiny", *main_job["LAYOUTS"][ranks], folder=ROOT / "conf")
    grid = Grid.infer(ranks, config.topology.pp, config.topology.dp, config.topology.tp)
    assert settle(config, grid.pp, grid.dp, grid.tp).topology.dp == 1


@pytest.mark.parametrize(("loss", "code"), [(1.0, 0), (99.0, 1)])
def test_a_loss_that_counting_reaches_is_a_failure(
    loss: float, code: int, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["name=a", f"run_root={tmp_path}", f"data.path={corpus}", "data.seq_len=16"]
    (tmp_path / "a").mkdir()
    rows = [{"step": 1, "val_loss": 50.0}, {"step": 2, "val_loss": loss}, {"step": 3}]
    (tmp_path / "a/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = compose(*keys, folder=ROOT / "conf")
    assert main_job["report"](config, 4, keys) == code
    assert f"validation loss {loss:.3f} is {'NOT ' if code else ''}below" in capsys.readouterr().out


def test_a_wrong_key_is_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_job["main"](["train.stepps=3"]) == 1
    said = capsys.readouterr()
    assert "did you mean train.steps?" in said.err and not said.out


def test_a_second_ctrl_c_ends_a_run_that_does_not_save() -> None:
    deaf = (
        "import signal, time; signal.signal(2, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    )
    before = {each: signal.getsignal(each) for each in main_job["PASSED_ON"]}
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout and process.stdout.readline()
            received = main_job["hand_on"](process)
            os.kill(os.getpid(), signal.SIGINT)
            assert process.poll() is None
            os.kill(os.getpid(), signal.SIGINT)
            assert process.wait(10) == -signal.SIGTERM
            assert received == [signal.SIGINT, signal.SIGINT]
        finally:
            process.kill()
            for each, handler in before.items():
                signal.signal(each, handler)
