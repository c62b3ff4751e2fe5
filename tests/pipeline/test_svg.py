from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from parallel3d.pipeline.actions import parse_action
from parallel3d.pipeline.draw import Panel
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.schedules import NAMES, build
from parallel3d.pipeline.simulate import Span, Timeline, simulate
from parallel3d.pipeline.svg import WIDEST, page

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def svg(timeline: Timeline, title: str) -> str:
    return page([Panel("", timeline)], title)


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def titles(root: ElementTree.Element) -> list[str]:
    """What the boxes are called, without their times."""
    return [(title.text or "").split(",")[0] for title in root.iter(f"{SVG}title")]


def numbers(root: ElementTree.Element) -> list[str]:
    """What stands in the boxes."""
    inside = (
        t for t in root.iter(f"{SVG}text") if {"dark", "light"} & set(t.get("class", "").split())
    )
    return [text.text or "" for text in inside]


def assert_all_inside(root: ElementTree.Element) -> None:
    right, bottom = map(float, root.attrib["viewBox"].split()[2:])
    for box in root.iter(f"{SVG}rect"):
        x, y = float(box.attrib["x"]), float(box.attrib["y"])
        assert 0 <= x <= x + float(box.attrib["width"]) <= right
        assert 0 <= y <= y + float(box.attrib["height"]) <= bottom
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) <= right and 0 < float(text.attrib["y"]) < bottom


@pytest.mark.parametrize("name", NAMES)
def test_every_compute_has_a_box_with_its_number(name: str) -> None:
    schedule = build(name, 4, 6)
    timeline = simulate(lower(schedule), comm=0.1)
    root = ElementTree.fromstring(svg(timeline, "a < b & c"))
    assert titles(root) == [str(action) for actions in schedule.program for action in actions]
    assert {"a < b & c", "forward", *(f"rank {rank}" for rank in range(4))} <= set(texts(root))
    wanted = [str(action.microbatch) for actions in schedule.program for action in actions]
    assert numbers(root) == wanted
    assert_all_inside(root)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_eight_ranks_and_32_microbatches_fit_a_page_and_show_their_numbers(name: str) -> None:
    timeline = simulate(build(name, 8, 32).program)
    root = ElementTree.fromstring(svg(timeline, ""))
    assert float(root.attrib["width"]) < WIDEST + 200
    assert len(numbers(root)) == sum(map(len, timeline.spans))
    assert_all_inside(root)


def test_a_page_of_two_timelines_has_one_scale_their_titles_the_unit_and_what_each_rank_idles() -> (
    None
):
    fast, slow = (simulate(build("1f1b", 2, 4).program, f=f) for f in (1, 2))
    sent = [
        [Span(parse_action("0SEND_F0"), 1.0, 1.5)],
        [Span(parse_action("1SEND_B3"), -9.0, -8.0)],
    ]
    root = ElementTree.fromstring(page([Panel("one", fast, sent), Panel("two", slow)], "all", "ms"))
    said = texts(root)
    assert said.count("ms") == said.count("idle") == 2
    assert {"all", "one", "two", "message", "20%"} <= set(said)
    assert titles(root).count("0SEND_F0") == 1
    assert "1SEND_B3" not in titles(root), "it lies before the first computation"
    boxes = [
        b for b in root.iter(f"{SVG}rect") if (t := b.find(f"{SVG}title")) is not None and t.text
    ]
    forwards = [float(b.attrib["width"]) for b in boxes if b[0].text.startswith("0F0,")]
    assert forwards[1] == pytest.approx(2 * forwards[0], rel=0.1)
    assert_all_inside(root)


def test_chunks_have_shades_of_their_own() -> None:
    root = ElementTree.fromstring(svg(simulate(build("interleaved", 2, 4, 8).program), ""))
    of_rank_0 = [box for box in root.iter(f"{SVG}rect") if len(box)][: 8 * 4 * 2]
    fills = {box.attrib["fill"] for box in of_rank_0}
    assert len(fills) == 16 and all(re.fullmatch("#[0-9a-f]{6}", fill) for fill in fills)


def test_it_follows_the_reader_or_paints_its_page() -> None:
    timeline = simulate(build("1f1b", 2, 2).program)
    assert "prefers-color-scheme: dark" in svg(timeline, "")
    for theme, paint in (("light", "#ffffff"), ("dark", "#0d1117")):
        painted = page([Panel("", timeline)], "", theme=theme)
        assert "prefers-color-scheme" not in painted and f'fill="{paint}"/>' in painted


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_the_pictures_of_the_readme_are_what_the_tool_draws(name: str, tmp_path: Path) -> None:
    out = tmp_path / "x.svg"
    _main([f"schedule={name}", "pp=4", "num_microbatches=8", f"out={out}"])
    assert out.read_text() == (ROOT / "docs" / f"{name}.svg").read_text()


def _main(arguments: list[str]) -> None:
    runpy.run_path(str(ROOT / "tools" / "draw.py"))["main"](arguments)


def test_a_png_is_made_by_cairosvg_of_a_painted_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[bytes] = []

    def svg2png(bytestring: bytes, **options: Any) -> bytes:
        pages.append(bytestring)
        return b"png"

    monkeypatch.setitem(sys.modules, "cairosvg", SimpleNamespace(svg2png=svg2png))  # type: ignore[arg-type]
    _main([f"out={tmp_path / 'x.png'}"])
    assert (tmp_path / "x.png").read_bytes() == b"png"
    assert b"#ffffff" in pages[0] and b"prefers" not in pages[0]


def test_without_cairosvg_a_png_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(ValueError, match=r"needs cairosvg .*pip install 'parallel3d\[png\]'"):
        _main([f"out={tmp_path / 'x.png'}"])
    assert not (tmp_path / "x.png").exists()
