from __future__ import annotations

import time
from pathlib import Path

import pytest

from parallel3d.config import Config, compose
from parallel3d.job import claimed
from parallel3d.topology import Axis, Topology
from tests.world import run_on


def config(root: Path, *overrides: str) -> Config:
    return compose(f"run_root={root}", *overrides)


def claim(config: Config) -> Path:
    with claimed(config, "gpt", Axis.single()) as folder:
        (folder / "config.yaml").touch()
    return folder


@pytest.mark.report("hydra-ecosystem/hydra#2925")
def test_two_jobs_of_one_second_get_two_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    names = [claim(config(tmp_path)).name for _ in range(3)]
    assert names == ["gpt-20260101-000000", "gpt-20260101-000000-2", "gpt-20260101-000000-3"]


def claim_late(topology: Topology, config: Config) -> str:
    time.sleep(0.4 * topology.rank)
    with claimed(config, "gpt", topology.world) as folder:
        if topology.rank == 0:
            (folder / "config.yaml").touch()
        return str(folder)


@pytest.mark.report("ashleve/lightning-hydra-template#393")
def test_ranks_that_start_apart_share_one_folder(tmp_path: Path) -> None:
    paths = run_on(4, claim_late, config=config(tmp_path))
    assert [Path(path) for path in set(paths)] == list(tmp_path.iterdir())


def refused(topology: Topology, config: Config) -> str:
    with (
        pytest.raises(ValueError, match="exists already") as caught,
        claimed(config, "gpt", topology.world),
    ):
        raise AssertionError
    return str(caught.value)


def test_an_existing_run_is_refused_on_every_rank_and_kept(tmp_path: Path) -> None:
    claim(config(tmp_path, "name=a"))
    messages = run_on(2, refused, config=config(tmp_path, "name=a"))
    assert all("checkpoint.resume=auto continues it" in message for message in messages)
    assert (tmp_path / "a" / "config.yaml").exists()
    assert claim(config(tmp_path, "name=a", "checkpoint.resume=auto")) == tmp_path / "a"


def test_an_error_before_the_first_file_leaves_no_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="no memory"),
        claimed(config(tmp_path, "name=a"), "gpt", Axis.single()),
    ):
        raise RuntimeError("no memory")
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_first_step_leaves_no_folder_and_a_later_one_keeps_it(
    tmp_path: Path,
) -> None:
    for name, line in (("a", ""), ("b", "{}\n")):
        with (
            pytest.raises(RuntimeError, match="no memory"),
            claimed(config(tmp_path, f"name={name}"), "gpt", Axis.single()) as folder,
        ):
            (folder / "config.yaml").touch()
            (folder / "metrics.jsonl").write_text(line)
            raise RuntimeError("no memory")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_path_to_resume_from_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.resume = '/none' does not exist: it is"):
        claim(config(tmp_path, "checkpoint.resume=/none"))
