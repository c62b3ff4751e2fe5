import io
import math

import pytest
from rich.console import Console

from parallel3d.log.console import Progress, describe, duration, report

from .records import record


def plain() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, width=10_000, highlight=False), out


def shown(every: int, num_steps: int = 12, done: int = 0, evaluated: int = 0) -> list[str]:
    to, out = plain()
    progress = Progress(num_steps=num_steps, done=done, every=every, to=to)
    for step in range(done + 1, num_steps + 1):
        progress.write(record(step, val_loss=1.5 if step == evaluated else None))
    progress.close()
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()
    return out.getvalue().splitlines()


def numbers(lines: list[str]) -> list[int]:
    return [int(line.removeprefix("step").split("/")[0]) for line in lines]


def test_plain_lines_come_at_the_first_step_every_nth_and_the_last() -> None:
    assert numbers(shown(every=5)) == [1, 5, 10, 12]
    assert numbers(shown(every=5, done=6)) == [7, 10, 12]


def test_without_lines_the_evaluated_step_is_still_shown() -> None:
    lines = shown(every=0, evaluated=7)
    assert numbers(lines) == [1, 7, 12]
    assert "val_loss 1.5000" in lines[1]


def test_time_left_is_the_mean_pace_after_the_first_step() -> None:
    to, out = plain()
    ticks = iter([0.0, 30.0, 32.0, 36.0])  # the first step takes 30 s, then 2 s and 4 s
    progress = Progress(num_steps=5, every=1, to=to, clock=lambda: next(ticks))
    for step in (1, 2, 3):
        progress.write(record(step))
    first, second, third = out.getvalue().splitlines()
    assert "left" not in first
    assert second.endswith("6 s left") and third.endswith("6 s left")


def test_a_terminal_gets_one_live_line_and_keeps_the_evaluations() -> None:
    out = io.StringIO()
    to = Console(
        file=out, force_terminal=True, width=100, highlight=False, _environ={"TERM": "xterm"}
    )
    progress = Progress(num_steps=3, every=1, to=to)
    for step in (1, 2, 3):
        progress.write(record(step, val_loss=1.5 if step == 2 else None))
    progress.close()
    progress.close()
    assert "\x1b[?25l" in out.getvalue() and "\x1b[?25h" in out.getvalue()  # cursor hidden, shown
    assert "val_loss 1.5000" in out.getvalue() and "step 3/3" in out.getvalue()


def test_a_terminal_that_cannot_draw_gets_plain_lines() -> None:
    out = io.StringIO()
    to = Console(file=out, force_terminal=True, width=100, _environ={"TERM": "dumb"})
    progress = Progress(num_steps=2, every=1, to=to)
    progress.write(record(1))
    progress.close()
    assert out.getvalue().startswith("step 1/2") and "\r" not in out.getvalue()


def test_force_color_does_not_draw_into_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = Progress(num_steps=2, every=1)
    progress.write(record(1))
    progress.close()
    assert capsys.readouterr().out.startswith("step 1/2")


def test_a_line_names_what_went_wrong_in_the_step() -> None:
    line = describe(record(3, loss=math.nan, skipped=True, mfu=0.4321), num_steps=100)
    assert line.startswith("step   3/100  loss nan")
    assert "mfu 43.2%" in line and line.endswith("skipped")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (119.4, "119 s"), (119.6, "0:02:00"), (3 * 3600 + 61, "3:01:01")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_report_keeps_long_values_whole_and_reads_no_markup() -> None:
    to, out = plain()
    path = "/runs/" + "x" * 300
    report("start [bold]", [("stages", "[cuts]", "[0, 3]"), ("run folder", path)], to)
    lines = out.getvalue().splitlines()
    assert lines[0] == "start [bold]"
    assert lines[1].split() == ["stages", "[cuts]", "[0,", "3]"]
    assert lines[2] == f"  run folder  {path}"
