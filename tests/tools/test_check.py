from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

CHECK = str(Path(__file__).resolve().parents[2] / "tools/check")


class Runs:
    """Stands in for `run`: notes what would run; the checks named in `broken` fail."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.done = broken, dict[str, list[str]]()

    def __call__(self, name: str, command: list[str]) -> bool:
        self.done[name] = command
        return name not in self.broken


def check(runs: Runs, *arguments: str) -> Any:
    main = runpy.run_path(CHECK)["main"]
    main.__globals__["run"] = runs
    return main(list(arguments))


def test_the_fast_checks_come_first_and_the_tests_last() -> None:
    runs = Runs()
    assert check(runs, "-k", "paper") == 0
    assert list(runs.done) == ["format", "lint", "arrows", "sizes", "types", "tests"]
    assert runs.done["tests"][-2:] == ["-k", "paper"]
    assert "--check" in runs.done["format"] and "--fix" not in runs.done["lint"]


@pytest.mark.parametrize("broken", ["format", "lint", "arrows", "sizes", "types"])
def test_a_failed_fast_check_fails_and_spares_the_tests(
    broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(broken)
    assert check(runs) == 1
    assert "types" in runs.done and "tests" not in runs.done
    assert f"failed: {broken} (" in capsys.readouterr().out


def test_failed_tests_fail() -> None:
    assert check(Runs("tests")) == 1


def test_fast_leaves_the_tests_out_and_fix_mends() -> None:
    runs = Runs()
    assert check(runs, "--fast", "--fix") == 0
    assert "tests" not in runs.done
    assert "--check" not in runs.done["format"] and "--fix" in runs.done["lint"]


def test_a_check_runs_with_its_own_programs_first_on_the_path() -> None:
    run = runpy.run_path(CHECK)["run"]
    first = "os.environ['PATH'].split(':')[0]"
    shown = f"import os, sys; sys.exit({first} != os.path.dirname(sys.executable))"
    assert run("path", ["-c", shown])
    assert not run("fails", ["-c", "raise SystemExit(3)"])
