"""Draw timelines as an SVG document, for light pages and dark ones."""

from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb
from html import escape
from itertools import chain

from parallel3d.pipeline.actions import Op
from parallel3d.pipeline.draw import Panel, typical
from parallel3d.pipeline.simulate import Span, Timeline
from parallel3d.pipeline.trace import CATEGORIES

ROW, GAP, LEFT, RIGHT, TOP = 30, 8, 76, 64, 72  # pixels
WIDEST = 3200
_COLOURS = {  # hue, saturation and lightness of chunk 0; a later chunk is lighter
    Op.FORWARD: (217, 72, 42),
    Op.BACKWARD: (152, 52, 33),
    Op.INPUT_GRAD: (182, 70, 29),
    Op.WEIGHT_GRAD: (30, 85, 36),
}
_STYLE = """
text { font-family: system-ui, sans-serif; font-size: 12px; fill: #57606a; text-anchor: middle }
.title { font-size: 16px; font-weight: 600; fill: #1f2328; text-anchor: start }
.panel { font-size: 13px; font-weight: 600; fill: #1f2328; text-anchor: start }
.start { text-anchor: start } .end { text-anchor: end }
.idle { fill: #818b98; fill-opacity: 0.14 } .tick { stroke: #818b98; stroke-opacity: 0.35 }
.message { fill: #818b98; fill-opacity: 0.75 }
"""
_DARK = "text { fill: #9198a1 } .title, .panel { fill: #f0f6fc }"
_BOXES = "text.dark { fill: #ffffff } text.light { fill: #1f2328 } .small { font-size: 9px }"
_PAGES = {"light": "#ffffff", "dark": "#0d1117"}


def page(panels: Sequence[Panel], title: str, unit: str = "", theme: str = "auto") -> str:
    """Draw timelines under each other at one scale; at the right, the share that each rank idles.

    A rank is a row, with a microbatch's number in each box. Colours say the op, lighter ones a
    later chunk. ``unit`` is that of the time; ``theme`` is ``auto``, which follows the reader's, or
    ``light`` or ``dark``, which paint the page too.
    """
    longest = max(panel.timeline.makespan for panel in panels)
    scale = max(24 / typical([panel.timeline for panel in panels]), 640 / max(longest, 1e-9))
    scale = min(scale, WIDEST / max(longest, 1e-9))  # pixels per unit of time
    body: list[str] = []
    y = TOP - 14.0
    for panel in panels:
        body += _panel(panel, scale, longest, unit, y)
        y += _height(panel)
    body += _legend(panels, y + 6)
    width, height = LEFT + longest * scale + RIGHT, y + 26
    size = f"{width:.0f} {height:.0f}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width:.0f}"'
        f' role="img" aria-label="{escape(title)}">'
    )
    paint = _PAGES.get(theme)
    paper = [f'<rect width="100%" height="100%" fill="{paint}"/>'] if paint else []
    name = f'<text class="title" x="16" y="30">{escape(title)}</text>'
    style = f"<style>{_style(theme)}</style>"
    return "\n".join([head, style, *paper, name, *body, "</svg>\n"])


def _style(theme: str) -> str:
    dark = {"light": "", "dark": _DARK}.get(
        theme, f"@media (prefers-color-scheme: dark) {{ {_DARK} }}"
    )
    return f"{_STYLE}{dark}\n{_BOXES}\n"


def _height(panel: Panel) -> float:
    return 16 + len(panel.timeline.spans) * (ROW + GAP) + 44


def _panel(panel: Panel, scale: float, longest: float, unit: str, y: float) -> Iterator[str]:
    timeline = panel.timeline
    right = LEFT + longest * scale + RIGHT
    yield f'<text class="panel" x="16" y="{y}">{escape(panel.title)}</text>'
    yield f'<text class="end" x="{right - 16:.2f}" y="{y}">idle</text>'
    top = y + 16
    bottom = top + len(timeline.spans) * (ROW + GAP)
    yield from _axis(timeline, scale, unit, top, bottom)
    idle = timeline.idle_shares
    for rank, spans in enumerate(timeline.spans):
        at = top + rank * (ROW + GAP)
        yield (
            f'<text class="end" x="{LEFT - 12}" y="{at + ROW / 2 + 4}">rank {rank}</text>'
            f'<text class="end" x="{right - 16:.2f}" y="{at + ROW / 2 + 4}">{idle[rank]:.0%}</text>'
            f'<rect class="idle" x="{LEFT}" y="{at}" width="{timeline.makespan * scale:.2f}"'
            f' height="{ROW}" rx="4"/>'
        )
        yield from _boxes(spans, scale, at)
        if panel.messages:
            yield from _slivers(panel.messages[rank], scale, at, timeline.makespan)


def _axis(timeline: Timeline, scale: float, unit: str, top: float, bottom: float) -> Iterator[str]:
    """A tick at every round number of time, about 60 pixels or more apart."""
    step = next(
        base * 10.0**power
        for power in range(-6, 12)
        for base in (1, 2, 5)
        if base * 10.0**power * scale >= 60
    )
    if unit:
        yield f'<text class="end" x="{LEFT - 12}" y="{bottom + 14}">{escape(unit)}</text>'
    for number in range(int(timeline.makespan / step + 1e-9) + 1):
        x = LEFT + number * step * scale
        yield (
            f'<line class="tick" x1="{x:.2f}" x2="{x:.2f}" y1="{top - 4}" y2="{bottom}"/>'
            f'<text x="{x:.2f}" y="{bottom + 14}">{number * step:.6g}</text>'
        )


def _boxes(spans: Sequence[Span], scale: float, y: float) -> Iterator[str]:
    stages = sorted({span.action.stage for span in spans})
    for action, start, end in spans:
        fill, shade = _colour(action.op, stages.index(action.stage), len(stages))
        x, width = LEFT + start * scale, (end - start) * scale
        gap = min(0.75, width / 8)
        yield (
            f'<rect x="{x + gap:.2f}" y="{y}" width="{max(width - 2 * gap, 0.5):.2f}"'
            f' height="{ROW}" rx="{min(4, width / 4):.2g}" fill="{fill}">'
            f"<title>{action}, {start:.4g} to {end:.4g}</title></rect>"
        )
        number = str(action.microbatch)
        if width >= 6 * len(number) + 1:
            size = "" if width >= 8 * len(number) + 3 else " small"
            yield (
                f'<text class="{shade}{size}" x="{x + width / 2:.2f}" y="{y + ROW / 2 + 4}">'
                f"{number}</text>"
            )


def _slivers(spans: Sequence[Span], scale: float, y: float, until: float) -> Iterator[str]:
    """The times in messages, thin, as far as they are in the picture."""
    for action, start, end in spans:
        a, b = max(0.0, start) * scale, min(until, end) * scale
        if b - a >= 0.5:
            yield (
                f'<rect class="message" x="{LEFT + a:.2f}" y="{y + ROW / 2 - 3}"'
                f' width="{b - a:.2f}" height="6"><title>{action}</title></rect>'
            )


def _legend(panels: Sequence[Panel], y: float) -> Iterator[str]:
    x = LEFT
    rows = list(chain.from_iterable(panel.timeline.spans for panel in panels))
    used = {span.action.op for row in rows for span in row}
    num_chunks = max((len({span.action.stage for span in row}) for row in rows), default=0)
    for op in (op for op in CATEGORIES if op in used):
        for chunk in range(num_chunks):
            yield (
                f'<rect x="{x + 18 * chunk}" y="{y - 11}" width="14" height="14" rx="3"'
                f' fill="{_colour(op, chunk, num_chunks)[0]}"/>'
            )
        x += 18 * num_chunks + 4
        yield f'<text class="start" x="{x}" y="{y}">{CATEGORIES[op]}</text>'
        x += 7 * len(CATEGORIES[op]) + 24
    if any(panel.messages for panel in panels):
        yield f'<rect class="message" x="{x}" y="{y - 7}" width="14" height="6"/>'
        yield f'<text class="start" x="{x + 22}" y="{y}">message</text>'
        x += 22 + 7 * len("message") + 24
    if num_chunks > 1:
        yield f'<text class="start" x="{x}" y="{y}">(a shade for each chunk)</text>'


def _colour(op: Op, chunk: int, num_chunks: int) -> tuple[str, str]:
    """The fill of a box, and whether its text is for a dark or a light one."""
    hue, saturation, darkest = _COLOURS[op]
    lightness = darkest + chunk * min(22, 46 / max(1, num_chunks - 1))
    rgb = hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    fill = "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
    return fill, "dark" if lightness < 48 else "light"
