import json
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel3d.log.tracker import Tracker

from .records import FakeWandb, record


def tracker(folder: Path, **changes: Any) -> Tracker:
    return Tracker(folder, {"a": {"b": 1}}, **({"mode": "offline", "project": "p"} | changes))


def test_rows_reach_wandb_in_order_with_step_as_their_axis(fake: FakeWandb, tmp_path: Path) -> None:
    run = tracker(tmp_path, entity="e", group="g", tags=("x", "y"))
    for step in (1, 2, 3):
        run.write(record(step).row())
    run.close()
    assert fake.rows == [(step, record(step).row()) for step in (1, 2, 3)]
    assert fake.metrics == [("step", None), ("*", "step")]
    assert fake.exit_codes == [0]
    (init,) = fake.inits
    assert init["config"] == {"a.b": 1}
    assert init["dir"] == str(tmp_path) and init["name"] == tmp_path.name
    assert (init["entity"], init["group"], init["tags"]) == ("e", "g", ["x", "y"])


def test_wandb_is_called_by_its_own_thread_alone(fake: FakeWandb, tmp_path: Path) -> None:
    tracker(tmp_path).close()
    assert fake.threads == {"wandb"}


def test_a_failed_run_is_marked_failed(fake: FakeWandb, tmp_path: Path) -> None:
    tracker(tmp_path).close(failed=True)
    assert fake.exit_codes == [1]


@pytest.mark.report("wandb/wandb#4482")
@pytest.mark.report("wandb/wandb#5632")
def test_after_a_resume_below_the_last_step_no_point_is_dropped(
    fake: FakeWandb, tmp_path: Path
) -> None:
    attempts = [(range(1, 8), 0), (range(5, 7), 3), (range(3, 10), 4)]  # to 7; from 4; from 2
    for steps, rewound in attempts:
        run = tracker(tmp_path, rewound=rewound, mode="online")
        for step in steps:
            run.write(record(step).row())
        run.close()
    assert [row["step"] for _, row in fake.rows] == [*range(1, 8), 5, 6, *range(3, 10)]
    assert len({init["id"] for init in fake.inits}) == 1
    assert [init["resume"] for init in fake.inits] == [None, "allow", "allow"]


def test_two_runs_have_two_ids(fake: FakeWandb, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tracker(tmp_path / name).close()
    assert len({init["id"] for init in fake.inits}) == 2


def raising(where: str) -> Callable[[str], None]:
    def on(name: str) -> None:
        if name == where:
            raise RuntimeError(f"no {name} today")

    return on


@pytest.mark.report("EleutherAI/bergson#249")
@pytest.mark.report("starVLA/starVLA#369")
@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_wandb_that_fails_gives_one_warning_and_is_off(
    fake: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    fake.on = raising(where)
    run = tracker(tmp_path)
    for step in (1, 2, 3):
        run.write(record(step).row())
    run.close()
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert f"W&B {where} failed: RuntimeError: no {where} today" in warning.getMessage()


@pytest.mark.report("leggedrobotics/rsl_rl#150")
@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_wandb_that_hangs_is_waited_for_no_longer_than_the_timeout(
    fake: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    reached, release = threading.Event(), threading.Event()

    def on(name: str) -> None:
        if name == where:
            reached.set()
            release.wait(60)

    fake.on = on
    run = tracker(tmp_path, timeout=0.1)
    run.write(record(1).row())
    if where != "finish":
        assert reached.wait(10)
        run._thread.join(0.15)  # as long as a few steps
    for step in range(2, 100):
        run.write(record(step).row())
    run.close()
    assert not release.is_set()
    (warning,) = caplog.records
    how = "did not finish" if where == "finish" else "did not answer"
    assert warning.getMessage().startswith(f"W&B {how} in 0.1 s; the run goes on without it")
    release.set()
    run._thread.join(10)
    assert not run._thread.is_alive()


def test_a_wandb_that_is_not_installed_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = tracker(tmp_path)
    run.write(record(1).row())
    run.close()
    assert "W&B init failed: ModuleNotFoundError" in caplog.text


def test_the_id_lies_in_the_run_folder(fake: FakeWandb, tmp_path: Path) -> None:
    tracker(tmp_path).close()
    kept = json.loads((tmp_path / "wandb" / "run.json").read_text())
    assert kept == {"id": fake.inits[0]["id"], "ahead": 0}
