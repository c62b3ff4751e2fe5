from __future__ import annotations

from pathlib import Path

import pytest

from tests.start import Finished, start, torchrun

SCRIPT = """
from pathlib import Path
import os, sys
from parallel3d import job
from parallel3d.launch import Launch

def main(cfg):
    if cfg.get("fail"):
        raise ValueError("planted by the task")
    if cfg.get("bug"):
        min([])
    if cfg.get("mine"):
        import mine_own
    print("ran", cfg.seed, cfg.model._target_, job.command(Launch(), "seed=3"))

job.start(main, Path({conf!r}), "pretrain")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT.format(conf=str(Path("conf").absolute())))
    return path


def run(script: Path, *arguments: str) -> Finished:
    return start([str(script), *arguments], cwd=script.parents[1])


def test_options_may_stand_between_overrides_and_a_sweep_runs_each_job(script: Path) -> None:
    ended = run(script, "run_root=r", "-m", "seed=1,2")
    assert ended.code == 0
    assert "ran 1 models.gpt.build" in ended.output
    assert "ran 2 models.gpt.build" in ended.output


def test_the_command_is_that_of_this_job_with_the_changes(script: Path) -> None:
    ended = run(script, "seed=1", "name=a b", "model=gpt_tiny")
    assert f"python {script} 'name=a b' model=gpt_tiny seed=3" in ended.output


def test_the_working_directory_is_importable(script: Path) -> None:
    (script.parents[1] / "mine_own.py").touch()
    assert run(script, "mine=true").code == 0


WRONG = {
    "model=gpt_tinny": "did you mean model=gpt_tiny?",
    "name=a=b": "'name=a=b' cannot be read: write key=value",
    "~zero.foo": "the configuration cannot be composed: Could not delete",
    "fail=true": "planted by the task",
    "data=nothing": "data = 'nothing' is not one of stdlib",
}


@pytest.mark.parametrize("override", WRONG)
def test_an_error_ends_non_zero_with_our_message_last(script: Path, override: str) -> None:
    ended = run(script, override)
    assert ended.code == 1
    assert WRONG[override] in ended.output.rstrip().splitlines()[-1]
    assert [path.name for path in script.parents[1].iterdir()] == ["folder"]


@pytest.mark.report("pytorch/pytorch#20728")
def test_a_sweep_ends_at_its_first_failing_job(script: Path) -> None:
    ended = run(script, "-m", "fail=true", "seed=1,2")
    assert ended.code == 1
    assert ended.output.count("ValueError: planted by the task") == 1


def test_the_launchers_summary_ends_with_our_message(script: Path) -> None:
    ended = torchrun([str(script), "model=gpt_tinny"], 2, cwd=script.parents[1])
    assert ended.code != 0
    lines = [line for line in ended.output.splitlines() if line.strip()]
    assert any("did you mean model=gpt_tiny?" in line for line in lines[-4:])


def test_an_error_of_ours_that_is_meant_is_one_line_and_a_bug_has_the_way_to_it(
    script: Path,
) -> None:
    assert "Traceback" not in run(script, "fail=true").output
    bug = run(script, "bug=true").output
    assert "Traceback" in bug and "min([])" in bug
