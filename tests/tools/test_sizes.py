from __future__ import annotations

import runpy
from pathlib import Path

import pytest

sizes = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools/sizes.py"))["main"]


def function(lines: int) -> str:
    return "def long() -> None:\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("source", "code"),
    [("x = 1\n" * 400, 0), ("x = 1\n" * 401, 1), (function(60), 0), (function(61), 1)],
    ids=["file 400", "file 401", "function 60", "function 61"],
)
@pytest.mark.parametrize("folder", ["parallel3d/zero", "models", "recipes", "tools", "tests"])
def test_files_end_at_400_lines_and_functions_at_60(
    folder: str, source: str, code: int, tmp_path: Path
) -> None:
    path = tmp_path / folder / "flat.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert sizes(tmp_path) == code


def test_medians_and_what_is_too_long_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools").mkdir()
    for lines in (2, 4, 70):
        (tmp_path / "tools" / f"of{lines}.py").write_text(function(lines))
    assert sizes(tmp_path) == 1
    out = capsys.readouterr().out
    assert "3 files, median 4 lines, longest 70 of 400 (tools/of70.py)" in out
    assert "tools/of70.py:1 long: 70 lines" in out
