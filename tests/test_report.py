from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parallel3d.build import build_data, build_engine, build_model
from parallel3d.config import compose, settle
from parallel3d.data import prepare
from parallel3d.pipeline.costs import Costs
from parallel3d.pipeline.schedules import build
from parallel3d.pipeline.simulate import simulate
from parallel3d.report import Place, _bytes_of, _sent, forecast, places, report_start
from parallel3d.topology import Topology
from tests.start import ROOT

SIZES = [
    *["model.width=16", "model.num_layers=2", "model.num_heads=2", "model.ffn_width=32"],
    *["data.seq_len=16", "data.global_batch_size=4", "pipeline.schedule=zbv"],
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokens")
    (root / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 100)
    prepare(f"text:{root}", "bytes", root / "tokens")
    return root / "tokens"


@pytest.mark.parametrize(
    ("partition", "stage", "basis"),
    [
        ("uniform", r"[\d,]+ parameters$", "if stages cost the same"),
        ("parameters", r"[\d.e-]+ GFLOP a microbatch \(\d+%\)$", "by counted FLOPs"),
        ("flops", r"[\d.e-]+ GFLOP a microbatch \(\d+%\)$", "by counted FLOPs"),
        ("measure", r"[\d.]+ ms a microbatch \(\d+%\)$", "with measured times"),
    ],
)
def test_the_start_tells_what_each_stage_should_cost_and_what_that_rests_on(
    partition: str, stage: str, basis: str, tokens: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*SIZES, f"data.path={tokens}", f"pipeline.partition={partition}"]
    config = settle(compose(*given, folder=ROOT / "conf"), 1, 1, 1)
    with Topology.init() as topology:
        data = build_data(config)
        model = build_model(config, topology, data)
        if partition == "uniform":  # data without a sample
            data = SimpleNamespace(train=None)
        engine = build_engine(config, topology, model, data)
        report_start(Path("runs/x"), config, engine, "at step 0", places(engine))
    lines = capsys.readouterr().out.splitlines()
    stages = [line for line in lines if line.startswith("  stage ")]
    assert len(stages) == 2 and all(re.search(stage, line) for line in stages)
    assert any(re.search(rf"zbv, bubble \d+% of a step {basis}$", line) for line in lines)
    (kept,) = (line for line in lines if line.startswith("  rank 0 "))
    told = [float(size) for size in re.findall(r"([\d.]+) MB", kept)]
    total, memory, *kinds = told
    assert total == pytest.approx(sum(kinds), abs=0.05 * len(told)) and memory > total
    assert ("activations" in kept) == (partition != "uniform")
    (split,) = (line for line in lines if line.startswith("  split "))
    share = re.search(r" (\d+)% of the parameters", split)
    assert share and 30 < int(share[1]) < 90, "embeddings and norms are not put off"


def parts(costs: Costs | None, unit: str = "seconds") -> Any:
    program = build("1f1b", 2, 4).program
    programs = SimpleNamespace(
        timeline=lambda: simulate(program), whole=lambda count: program, num_microbatches=4
    )
    return SimpleNamespace(programs=programs, costs=costs, cost_unit=unit)


def test_a_forecast_is_in_milliseconds_where_stages_were_measured() -> None:
    costs = Costs((0.001, 0.002), (0.001, 0.002), (0.0, 0.0), (8, 8), (0, 0), (2, 0), comm=0.0005)
    timeline, unit = forecast(parts(costs))
    assert unit == "ms"
    first, second = timeline.spans
    assert (first[0].end, second[0].start, second[0].end) == pytest.approx((1.0, 1.5, 3.5))
    assert max(timeline.peak_bytes) >= 16
    counted, unit = forecast(parts(Costs(*costs[:6]), "FLOPs"))
    assert unit == "GFLOP" and counted.makespan == pytest.approx(18e-12)


def test_a_forecast_of_stages_that_nobody_looked_at_has_no_unit() -> None:
    timeline, unit = forecast(parts(None))
    assert (timeline.makespan, unit) == (15.0, "")


def test_of_each_rank_the_start_tells_what_it_keeps_of_what_it_has_and_what_it_sends() -> None:
    kept = {"parameters": 1e6, "gradients": 2e6, "optimizer": 4e6, "gathered": 5e5}
    ranks = [Place("a", kept, 80 * 10**9, 56 * 10**6, 0, 1)] * 2
    (row, _) = _bytes_of(ranks)
    assert row == (
        "rank 0",
        "7.5 MB of 80000.0 MB: parameters 1.0 MB, gradients 2.0 MB, optimizer 4.0 MB, "
        "gathered 0.5 MB",
    )
    assert _sent(ranks) == ", a rank sends 56.0 MB over dp in a step"
    assert _sent([ranks[0]._replace(sent=0)]) == ""
