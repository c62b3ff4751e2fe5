import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.log import jsonl
from parallel3d.log.jsonl import Jsonl

from .records import record


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def written(path: Path, *numbers: int, resume_step: int = 0) -> Jsonl:
    lines = Jsonl(path, resume_step=resume_step)
    for number in numbers:
        lines.write(record(number).row())
    lines.close()
    return lines


def test_a_row_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = Jsonl(path)
    for number in (1, 2, 3):
        lines.write(record(number).row())
        assert json.loads(path.read_bytes().splitlines()[-1]) == record(number).row()
    lines.close()
    lines.close()


def test_a_number_that_strict_json_lacks_is_refused(tmp_path: Path) -> None:
    lines = Jsonl(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        lines.write({"step": 1, "loss": float("nan")})
    lines.close()
    assert steps(tmp_path / "metrics.jsonl") == []


def test_after_a_resume_each_step_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, *range(1, 8))
    assert written(path, *range(5, 10), resume_step=4).dropped == 3
    assert steps(path) == list(range(1, 10))


def test_resuming_where_the_log_ends_rewrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2, 3)
    before = path.stat().st_ino
    assert written(path, 4, resume_step=3).dropped == 0
    assert (path.stat().st_ino, steps(path)) == (before, [1, 2, 3, 4])


def test_a_run_that_starts_over_drops_all_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2, 3)
    assert written(path, 1, resume_step=0).dropped == 3
    assert steps(path) == [1]


@pytest.mark.parametrize("kept", [1, 7, -2])
def test_a_half_written_last_line_is_dropped(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2, 3)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole.removesuffix(last) + last[:kept])
    written(path, 3, 4, resume_step=2)
    assert steps(path) == [1, 2, 3, 4]


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    written(path, 3, resume_step=2)
    assert steps(path) == [1, 2, 3]


def test_a_half_written_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, 1, 2)
    with path.open("ab") as file:
        file.write(b'{"step": 3, "lo')
    written(path, 3, resume_step=2)
    assert steps(path) == [1, 2, 3]


def test_a_kill_while_lines_are_dropped_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, *range(1, 8))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, name, killed)
            patch.setattr(Path, name, killed, raising=False)
            Jsonl(path, resume_step=4)
        assert steps(path) == list(range(1, 8))
    written(path, 5, resume_step=4)
    assert steps(path) == [1, 2, 3, 4, 5]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_killed_process_loses_no_line(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "import importlib.util as u\n"
        "spec = u.spec_from_file_location('jsonl', sys.argv[1]); m = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(m)\n"
        "lines = m.Jsonl(m.Path('metrics.jsonl'))\n"
        "[lines.write({'step': s}) for s in range(1, 101)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, jsonl.__file__, "."], cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert steps(tmp_path / "metrics.jsonl") == list(range(1, 101))
