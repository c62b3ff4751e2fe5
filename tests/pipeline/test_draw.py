import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from parallel3d.pipeline import draw
from parallel3d.pipeline.actions import parse, show
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import NAMES, build
from parallel3d.pipeline.simulate import simulate

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


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


def test_nothing_draws_as_nothing() -> None:
    assert draw.text(simulate([])) == ""


def test_summary_is_one_line() -> None:
    timeline = simulate(build("zbv", 4, 8).program)
    assert draw.summary(timeline) == "makespan 25.5  bubble 1.5  peak 4"


@pytest.mark.parametrize("name", NAMES)
def test_svg_has_a_box_with_its_number_for_every_compute(name: str) -> None:
    schedule = build(name, 4, 6)
    timeline = simulate(lower(schedule), comm=0.1)
    page = ElementTree.fromstring(draw.svg(timeline, "a < b & c"))
    titles = [title.text for title in page.iter(f"{SVG}title")]
    assert titles == [str(action) for actions in schedule.program for action in actions]
    texts = [text.text for text in page.iter(f"{SVG}text")]
    assert {"a < b & c", "forward", *(f"rank {rank}" for rank in range(4))} <= set(texts)
    right = float(page.attrib["width"])
    assert all(
        0 <= float(box.attrib["x"]) <= float(box.attrib["x"]) + float(box.attrib["width"]) <= right
        for box in page.iter(f"{SVG}rect")
    )


def test_svg_reads_on_light_and_dark_pages() -> None:
    assert "prefers-color-scheme: dark" in draw.svg(simulate(build("1f1b", 2, 2).program), "")


def test_the_picture_of_the_readme_is_what_the_tool_draws(tmp_path: Path) -> None:
    out = tmp_path / "x.svg"
    _main(["schedule=1f1b", "pp=4", "num_microbatches=8", f"out={out}"])
    assert out.read_text() == (ROOT / "docs" / "1f1b.svg").read_text()


def _main(arguments: list[str]) -> None:
    runpy.run_path(str(ROOT / "tools" / "draw.py"))["main"](arguments)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["schedule=interleaved", "num_chunks=4"], "makespan 26.25  bubble 2.25  peak 4.75"),
        (["schedule=1f1b", "pp=8", "num_microbatches=32", "i=1.2", "w=0.8", "comm=0.05"], "120.4"),
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
    path.write_text(show(lower(build("zb-h1", 4, 8))))
    assert parse(path.read_text())
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
