"""One small run on pp = 2 x dp = 2, and everything that it tells of its time."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import pytest

from parallel3d.config import compose, settle
from parallel3d.data import prepare
from parallel3d.log.meters import Record
from parallel3d.pipeline.actions import COMPUTE, parse
from parallel3d.pipeline.measured import measured, simulated
from parallel3d.pipeline.trace import CATEGORIES, Trace, from_json, to_json
from parallel3d.topology import Grid, Topology
from tests.start import ROOT
from tests.world import run_on

from .records import wandb_history

SIZES = [
    *["model.width=16", "model.num_layers=2", "model.num_heads=2", "model.ffn_width=32"],
    *["data.seq_len=16", "data.global_batch_size=8", "train.eval_every=2", "train.eval_batches=1"],
    *["train.steps=3", "checkpoint.every=0", "log.every=0", "pipeline.schedule=zb-h1"],
]


def train_on(topology: Topology, folder: Path, overrides: list[str]) -> None:
    from parallel3d.train import train

    grid = topology.grid
    config = settle(compose(*SIZES, *overrides, folder=ROOT / "conf"), grid.pp, grid.dp, grid.tp)
    folder.mkdir(parents=True, exist_ok=True)
    train(replace(config, name=folder.name), topology, folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    (root / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 100)
    prepare(f"text:{root}", "bytes", root / "tokens")
    return root


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    """A run, with W&B offline, whose timeline is written at steps 2 and 3."""
    overrides = [f"data.path={root / 'tokens'}", "log.trace=2", "log.wandb.mode=offline"]
    run_on(Grid(pp=2, dp=2), train_on, folder=root / "small", overrides=overrides)
    return root / "small"


@pytest.fixture(scope="module")
def trace(folder: Path) -> Trace:
    return from_json((folder / "trace.json").read_text())


def test_the_file_is_of_the_last_step_and_reads_back(folder: Path, trace: Trace) -> None:
    assert (trace.run, trace.step, trace.schedule, trace.costs) == ("small", 3, "zb-h1", None)
    assert trace.program == parse((folder / "program.txt").read_text())
    assert to_json(trace) == (folder / "trace.json").read_text()


def test_every_computation_of_the_program_is_there_once_for_each_rank(folder: Path) -> None:
    content = json.loads((folder / "trace.json").read_text())
    events = [event for event in content["traceEvents"] if event["ph"] == "X"]
    names = {
        e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"
    }
    assert names[3] == "rank 3 (pp 1, dp 1, tp 0)" and len(names) == 4
    computed = set(CATEGORIES.values())
    seen = Counter((event["pid"], event["name"]) for event in events if event["cat"] in computed)
    program = parse((folder / "program.txt").read_text())
    wanted = {
        (2 * pp + dp, str(action))
        for pp, actions in enumerate(program)
        for dp in range(2)
        for action in actions
        if action.op in COMPUTE
    }
    assert set(seen) == wanted and set(seen.values()) == {1}
    assert {event["cat"] for event in events} <= computed | {"wait", "message"}


def test_spans_end_after_they_start_and_those_of_a_rank_do_not_overlap(trace: Trace) -> None:
    for lane in trace.lanes:
        every = sorted([*lane.computes, *lane.waits, *lane.messages], key=lambda span: span.start)
        assert all(0 <= span.start <= span.end for span in every)
        assert all(one.end <= other.start + 2e-9 for one, other in pairwise(every))


def test_both_pictures_hold_the_same_computations_in_the_same_order(trace: Trace) -> None:
    for replica in range(2):
        did, should = measured(trace, replica), simulated(trace, replica)
        for one, other in zip(did.spans, should.spans, strict=True):
            assert [span.action for span in one] == [span.action for span in other]
        busy = [[sum(s.end - s.start for s in row) for row in t.spans] for t in (did, should)]
        assert busy[0] == pytest.approx(busy[1])
        assert min(row[0].start for row in did.spans) == 0


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_line_has_the_bubble_of_every_stage_beside_the_keys_of_a_record(folder: Path) -> None:
    bubbles = {"stage/0/bubble", "stage/1/bubble"}
    fields = set(Record.__dataclass_fields__) - {"stage_bubble", "val_loss", "loss_scale"}
    lines = rows(folder)
    assert [line.keys() - {"val_loss"} for line in lines] == [fields | bubbles] * 3
    assert all(0 <= line[key] < 1 for line in lines for key in bubbles)


def test_the_bubble_in_the_line_is_that_of_the_timeline_and_the_mean_of_replicas(
    folder: Path, trace: Trace
) -> None:
    shares = [measured(trace, replica).idle_shares for replica in range(2)]
    for stage in range(2):
        expected = fmean(share[stage] for share in shares)
        assert rows(folder)[-1][f"stage/{stage}/bubble"] == pytest.approx(expected, abs=1e-4)


def test_wandb_has_the_bubble_and_the_memory_of_every_stage(folder: Path) -> None:
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    lines = rows(folder)
    for sent, line in zip(wandb_history(file), lines, strict=True):
        for stage in range(2):
            assert sent[f"stage/{stage}/bubble"] == line[f"stage/{stage}/bubble"]
            assert 2**20 < sent[f"stage/{stage}/memory"] <= line["peak_memory_bytes"]
        assert line["peak_memory_bytes"] >= max(sent[f"stage/{s}/memory"] for s in range(2))


def test_the_prediction_is_drawn_at_the_start(folder: Path) -> None:
    drawn = (folder / "pipeline.svg").read_text()
    ElementTree.fromstring(drawn)
    assert "small: zb-h1, 4 microbatches" in drawn
    assert "predicted by counted FLOPs · bubble " in drawn


def draw(*arguments: str) -> None:
    runpy.run_path(str(ROOT / "tools" / "draw.py"))["main"](list(arguments))


def test_the_tool_draws_what_a_run_did_above_what_it_should_have_done(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(f"run={folder}", f"out={tmp_path / 'x.svg'}")
    printed = capsys.readouterr().out
    assert printed.startswith("small, step 3: zb-h1, 2 ranks, 4 microbatches, one of 2 replicas\n")
    assert [line.split()[0] for line in printed.splitlines() if " · " in line] == [
        "measured",
        "simulated",
    ]
    assert "stage  rank" in printed and "I ms" in printed and "W ms" in printed
    assert printed.splitlines()[-1].startswith("makespan ")
    said = [
        t.text
        for t in ElementTree.parse(tmp_path / "x.svg").iter("{http://www.w3.org/2000/svg}text")
    ]
    assert said.count("ms") == 2 and said.count("rank 1") == 2 and "message" in said


def test_the_tool_writes_both_timelines_for_perfetto(folder: Path, tmp_path: Path) -> None:
    draw(f"run={folder}", f"out={tmp_path / 'x.json'}")
    both = from_json((tmp_path / "x.json").read_text())
    assert [lane.name for lane in both.lanes[4:]] == ["simulated rank 0", "simulated rank 1"]
    assert [lane.replica for lane in both.lanes] == [0, 1, 0, 1, -1, -1]
    draw("schedule=zbv", f"out={tmp_path / 'y.json'}")
    assert len(from_json((tmp_path / "y.json").read_text()).lanes) == 4


@pytest.mark.parametrize("argument", ["pp=2", "f=3", "schedule=zbv"])
def test_what_is_known_of_a_run_is_refused_beside_it(folder: Path, argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument.split('=')[0]} is known of a run"):
        draw(f"run={folder}", argument)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"otherData": {"ranks": [1]}}'])
def test_a_file_that_is_no_timeline_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=r"trace\.json: not the timeline of a run"):
        draw(f"run={tmp_path}")


def test_no_timeline_is_written_if_none_is_wanted(root: Path) -> None:
    overrides = [f"data.path={root / 'tokens'}", "log.trace=0", "log.wandb.mode=disabled"]
    run_on(1, train_on, folder=root / "none", overrides=overrides)
    assert not (root / "none" / "trace.json").exists()
    assert not (root / "none" / "pipeline.svg").exists(), "one rank is no pipeline"
    assert all("stage/0/bubble" in row for row in rows(root / "none"))


def test_a_line_in_fp16_has_the_loss_scale_that_the_step_left(root: Path) -> None:
    overrides = [f"data.path={root / 'tokens'}", "log.trace=0", "log.wandb.mode=disabled"]
    scaled = ["precision=fp16", "fp16.initial_scale=8", "fp16.window=2", "zero.reduce_dtype=fp16"]
    run_on(1, train_on, folder=root / "fp16", overrides=[*overrides, *scaled])
    assert [row["loss_scale"] for row in rows(root / "fp16")] == [8, 16, 16]
