from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Stands in for Python: `-m venv` copies itself into .venv, everything it is asked is logged.
PYTHON = """#!/bin/sh
echo "$@" >> log
case "$*" in "-m venv"*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python;; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tools").mkdir()
    (tmp_path / "programs").mkdir()
    for name in "Makefile pyproject.toml setup.py tools/constraints-cpu.txt".split():
        shutil.copy(ROOT / name, tmp_path / name)
    for name in "sh make cat cksum cp rm mkdir touch echo".split():
        program = shutil.which(name)
        assert program, name
        (tmp_path / "programs" / name).symlink_to(program)
    (tmp_path / "programs/python3").write_text(PYTHON)
    (tmp_path / "programs/python3").chmod(0o755)
    return tmp_path


def make(checkout: Path, target: str) -> str:
    """What Python was asked to do by one `make`."""
    env = {**os.environ, "PATH": str(checkout / "programs")}
    (checkout / "log").write_text("")
    done = subprocess.run(
        ["make", target], cwd=checkout, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return (checkout / "log").read_text()


def test_each_command_sets_up_once_and_then_only_runs(checkout: Path) -> None:
    first = make(checkout, "train")
    assert "-m venv" in first and "install" in first and "tools/main_job.py" in first
    assert make(checkout, "train") == "tools/main_job.py\n"
    assert make(checkout, "test") == "tools/check\n"


def test_a_changed_project_file_installs_again(checkout: Path) -> None:
    make(checkout, "test")
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("\n")
    assert "install" in make(checkout, "test")
    assert make(checkout, "test") == "tools/check\n"


def test_without_an_nvidia_driver_the_cpu_torch_is_pinned(checkout: Path) -> None:
    assert "--constraint tools/constraints-cpu.txt" in make(checkout, "test")
    assert "torch==2.13.0" in (ROOT / "tools/constraints-cpu.txt").read_text()
    (checkout / "programs/nvidia-smi").symlink_to("/bin/true")
    with_driver = make(checkout, "test")
    assert "install" in with_driver and "--constraint" not in with_driver


def test_the_makefile_has_exactly_two_commands() -> None:
    rules = (ROOT / "Makefile").read_text().splitlines()
    assert ".PHONY: train test" in rules
    assert [rule.split(":")[0] for rule in rules if rule and rule[0].islower()] == ["train", "test"]


def test_ci_runs_make_test(checkout: Path) -> None:
    (checkout / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", checkout / ".ci/run")
    env = {**os.environ, "PATH": f"{checkout / 'programs'}:{os.environ['PATH']}"}
    subprocess.run(["bash", ".ci/run"], cwd=checkout, env=env, check=True, capture_output=True)
    assert "tools/check" in (checkout / "log").read_text()
