import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.pipeline import draw
from parallel3d.pipeline.actions import parse_action, show
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import build
from parallel3d.pipeline.simulate import Span, Timeline, simulate

ROOT = Path(__file__).parents[2]


def test_text_shows_one_row_a_rank_to_scale() -> None:
    assert draw.text(simulate(build("1f1b", 2, 2).program)).splitlines() == [
        "rank 0  F0 F1 ......B0    ...B1",
        "rank 1  ...F0 B0    F1 B1    ......",
    ]


def test_text_names_the_stage_where_a_rank_holds_several() -> None:
    text = draw.text(simulate(build("zbv", 2, 3).program))
    assert text.startswith("rank 0  0F0 0F1 0F2 3F0 3I0 3W0")


def test_text_folds_to_the_terminal_and_loses_nothing() -> None:
    timeline = simulate(build("1f1b", 2, 8).program)
    whole, folded = draw.text(timeline).splitlines(), draw.text(timeline, 40).splitlines()
    assert max(map(len, folded)) <= 40
    rows = ["".join(line[8:].ljust(32) for line in folded[rank::3]) for rank in range(2)]
    assert [row.rstrip() for row in rows] == [line[8:] for line in whole]


def test_computes_that_take_no_time_draw_as_nothing() -> None:
    timeline = simulate(lower(build("1f1b", 2, 3)), f=0, i=0, w=0)
    assert draw.text(timeline) == draw.text(timeline, 80) == ""


def test_nothing_draws_as_nothing() -> None:
    assert draw.text(simulate([])) == ""


def test_summary_is_one_line() -> None:
    timeline = simulate(build("zbv", 4, 8).program)
    assert draw.summary(timeline) == "makespan 25.5  bubble 1.5  peak 4"


def test_timelines_are_drawn_under_each_other_at_one_scale() -> None:
    fast, slow = (simulate(build("1f1b", 2, 2).program, f=f) for f in (1, 2))
    lines = draw.side_by_side([draw.Panel("fast", fast), draw.Panel("slow", slow)]).splitlines()
    assert [line for line in lines if line in ("fast", "slow")] == ["fast", "slow"]
    assert lines[1] == "rank 0  F0 F1 ......B0    ...B1"
    assert lines[5] == "rank 0  F0    F1    ......B0    ......B1"


def test_what_is_too_short_for_its_label_shows_its_op_and_never_a_wrong_number() -> None:
    long = [Span(parse_action(f"0F{k}"), 10 * k, 10 * k + 9) for k in range(12)]
    short = Span(parse_action("0B11"), 119, 123)
    row = draw.text(Timeline([[*long, short]], [1], [0])).split("  ", 1)[1]
    assert "F10 " in row and "F11" in row
    assert row.endswith("B") and "B1" not in row


def test_the_share_of_a_rank_that_idles() -> None:
    timeline = Timeline(
        [[Span(parse_action("0F0"), 0, 3)], [Span(parse_action("1F0"), 3, 4)]], [], []
    )
    assert timeline.idle_shares == [0.25, 0.75]
    assert Timeline([[]], [], []).idle_shares == [0.0]


def _main(arguments: list[str]) -> None:
    runpy.run_path(str(ROOT / "tools" / "draw.py"))["main"](arguments)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["schedule=interleaved", "num_chunks=4"], "makespan 26.25  bubble 2.25  peak 4.75"),
        (["schedule=1f1b", "pp=8", "num_microbatches=32", "i=1.2", "w=0.8", "comm=0.05"], "120.4"),
        (["schedule=auto"], "makespan 25.5  bubble 1.5  peak 4"),
        (["schedule=zbv", "pp=1", "num_microbatches=1"], "makespan 3  bubble 0  peak 1"),
    ],
)
def test_the_tool_takes_chunks_and_times(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _main(arguments)
    assert line in capsys.readouterr().out.splitlines()[-1]


def test_the_tool_draws_a_program_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.txt"
    path.write_text("# mine\n" + show(lower(build("zb-h1", 4, 8))))
    _main([f"schedule={path}"])
    assert capsys.readouterr().out.splitlines()[-1] == "makespan 27  bubble 3  peak 4"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("shedule=zbv", "'shedule=zbv' is not an argument: .* schedule, pp,"),
        ("zbv", "'zbv' is not an argument"),
        ("f=fast", "f = 'fast': a time is a number"),
        ("w=-1", "w = '-1': a time is a number, 0 or more"),
        ("pp=two", "pp = 'two': a count is a whole number"),
        ("schedule=2f2b", "pipeline.schedule = '2f2b'"),
        ("out=x.gif", "out = 'x.gif' must end in .svg, .png, .json"),
        ("theme=blue", "theme = 'blue' is not one of auto, light, dark"),
        ("run=nowhere", "run = 'nowhere' has no trace.json: a run writes it every log.trace"),
    ],
)
def test_the_tool_refuses_wrong_arguments(argument: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _main([argument])


def test_the_tool_runs_as_a_command_and_says_what_is_wrong_in_one_line() -> None:
    def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "tools/draw.py", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    good, bad = tool("schedule=gpipe", "pp=4", "num_microbatches=8"), tool("pp=0")
    assert good.returncode == 0
    assert re.fullmatch(r"makespan 33  bubble 9  peak 8", good.stdout.splitlines()[-1])
    assert bad.returncode == 1
    assert bad.stderr == "topology.pp = 0: a pipeline has 1 rank or more\n"
