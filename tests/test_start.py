from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.start import kill_tree, running, start, torchrun

SCRIPT = """
import os, sys, time
from parallel3d.topology import Topology
with Topology.init() as topology:
    print(f"rank {topology.rank} of {topology.grid} got {sys.argv[1:]}", flush=True)
    open(f"pid-{topology.rank}", "w").write(str(os.getpid()))
    if "fail" in sys.argv and topology.rank == 1:
        raise SystemExit(3)
    if "hang" in sys.argv:
        time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def pids_left(folder: Path) -> list[int]:
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    return [pid for pid in pids if running(pid)]


def test_a_script_runs_on_ranks_and_its_output_is_kept(script: Path) -> None:
    done = start([str(script), "a=1"], ranks=2, cwd=script.parent)
    assert (done.code, done.codes) == (0, (0, 0)), done.output
    assert all(f"rank {rank} of 1x2x1 got ['a=1']" in done.output for rank in range(2))


def test_the_exit_code_of_the_failing_rank_is_returned(script: Path) -> None:
    done = start([str(script), "fail"], ranks=2, cwd=script.parent)
    assert done.codes[1] == 3 and done.code != 0


def test_scripts_that_hang_end_at_the_timeout_or_soon_after_a_failure(script: Path) -> None:
    done = start([str(script), "hang"], ranks=2, cwd=script.parent, timeout=2)
    assert done.codes == (-9, -9)
    done = start([str(script), "hang", "fail"], ranks=2, cwd=script.parent, grace=0.5)
    assert done.codes == (-9, 3)
    assert not pids_left(script.parent)


def test_torchrun_is_found_and_starts_ranks(script: Path) -> None:
    done = torchrun([str(script), "a=1"], ranks=2, cwd=script.parent)
    assert done.code == 0 and "rank 1 of 1x2x1 got ['a=1']" in done.output, done.output


def test_a_tree_of_processes_is_killed_across_sessions(tmp_path: Path) -> None:
    in_session = "echo $$ > new; mv new pid-1; sleep 600; true"
    command = f"setsid sh -c '{in_session}' & sleep 600; true"
    with subprocess.Popen(["sh", "-c", command], cwd=tmp_path) as tree:
        while not list(tmp_path.glob("pid-*")):
            tree.poll()
        kill_tree(tree.pid)
    assert tree.returncode == -9 and not pids_left(tmp_path)
