"""Draw a timeline: as text for a terminal, as SVG for a page, light or dark."""

from collections.abc import Iterator
from colorsys import hls_to_rgb
from html import escape

from parallel3d.pipeline.actions import Action, Op
from parallel3d.pipeline.simulate import Timeline

ROW, GAP, LEFT, TOP, BOTTOM = 30, 8, 72, 68, 72  # pixels
_COLOURS = {  # hue, saturation and lightness of chunk 0; a later chunk is lighter
    Op.FORWARD: (217, 72, 42),
    Op.BACKWARD: (152, 52, 33),
    Op.INPUT_GRAD: (182, 70, 29),
    Op.WEIGHT_GRAD: (30, 85, 36),
}
_MEANINGS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRAD: "input gradient",
    Op.WEIGHT_GRAD: "weight gradient",
}
_STYLE = """
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #57606a; text-anchor: middle }
.title { font-size: 16px; font-weight: 600; fill: #1f2328; text-anchor: start }
.start { text-anchor: start } .end { text-anchor: end }
.idle { fill: #818b98; fill-opacity: 0.14 } .tick { stroke: #818b98; stroke-opacity: 0.4 }
.dark { fill: #ffffff } .light { fill: #1f2328 }
@media (prefers-color-scheme: dark) { text { fill: #9198a1 } .title { fill: #f0f6fc } }
text.dark { fill: #ffffff } text.light { fill: #1f2328 }
"""


def summary(timeline: Timeline) -> str:
    """One line: the time a step takes, what a rank idles of it, and the activations it keeps."""
    return (
        f"makespan {timeline.makespan:.6g}  bubble {timeline.bubble:.6g}  peak {timeline.peak:.6g}"
    )


def text(timeline: Timeline, columns: int | None = None) -> str:
    """Draw one row a rank, time to the right, a dot for idle; folded to ``columns`` if given.

    A computation is shown by its op and microbatch, with its stage in front if ranks hold several.
    """
    spans = [span for row in timeline.spans for span in row]
    if not spans:
        return ""
    has_chunks = len({span.action.stage for span in spans}) > len(timeline.spans)
    widest = max(len(_label(span.action, has_chunks)) for span in spans)
    shortest = min((span.end - span.start for span in spans if span.end > span.start), default=1.0)
    scale = (widest + 1) / shortest  # characters per unit of time
    width = round(timeline.makespan * scale)
    rows = []
    for row in timeline.spans:
        line = "." * width
        for action, start, end in row:
            a, b = round(start * scale), round(end * scale)
            line = line[:a] + _label(action, has_chunks).ljust(b - a)[: b - a] + line[b:]
        rows.append(line)
    names = [f"rank {rank}".ljust(len(f"rank {len(rows) - 1}")) + "  " for rank in range(len(rows))]
    step = width if columns is None else max(widest + 1, columns - len(names[0]))
    blocks = (
        "\n".join(
            (name + row[at : at + step]).rstrip() for name, row in zip(names, rows, strict=True)
        )
        for at in range(0, width, step)
    )
    return "\n\n".join(blocks)


def svg(timeline: Timeline, title: str) -> str:
    """Draw one row a rank as an SVG document, a microbatch's number in each box.

    Its colours say the op, lighter ones a later chunk; it reads on light and dark pages.
    """
    ends = [
        span.end - span.start for row in timeline.spans for span in row if span.end > span.start
    ]
    scale = max(24 / min(ends, default=1.0), 640 / max(timeline.makespan, 1e-9))  # pixels per time
    width = LEFT + timeline.makespan * scale + 24
    bottom = TOP + len(timeline.spans) * (ROW + GAP)
    body = [
        f'<text class="title" x="16" y="30">{escape(title)}</text>',
        f'<text class="start" x="16" y="50">{summary(timeline).replace("  ", " · ")}</text>',
        *_axis(timeline, scale, bottom),
        *_rows(timeline, scale),
        *_legend(timeline, bottom + 46),
    ]
    size = f"{width:.0f} {bottom + BOTTOM:.0f}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width:.0f}"'
        f' role="img" aria-label="{escape(title)}">'
    )
    return "\n".join([head, f"<style>{_STYLE}</style>", *body, "</svg>\n"])


def _label(action: Action, has_chunks: bool) -> str:
    return str(action) if has_chunks else f"{action.op.value}{action.microbatch}"


def _axis(timeline: Timeline, scale: float, bottom: float) -> Iterator[str]:
    """A tick at every round number of time, about 60 pixels or more apart."""
    step = next(
        base * 10.0**power
        for power in range(-6, 12)
        for base in (1, 2, 5)
        if base * 10.0**power * scale >= 60
    )
    for number in range(int(timeline.makespan / step + 1e-9) + 1):
        x = LEFT + number * step * scale
        yield (
            f'<line class="tick" x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 4}" y2="{bottom}"/>'
            f'<text x="{x:.2f}" y="{bottom + 14}">{number * step:.6g}</text>'
        )


def _rows(timeline: Timeline, scale: float) -> Iterator[str]:
    for rank, row in enumerate(timeline.spans):
        y = TOP + rank * (ROW + GAP)
        yield (
            f'<text class="end" x="{LEFT - 12}" y="{y + ROW / 2 + 4}">rank {rank}</text>'
            f'<rect class="idle" x="{LEFT}" y="{y}" width="{timeline.makespan * scale:.2f}"'
            f' height="{ROW}" rx="4"/>'
        )
        stages = sorted({span.action.stage for span in row})
        for action, start, end in row:
            fill, shade = _colour(action.op, stages.index(action.stage))
            x, width = LEFT + start * scale, (end - start) * scale
            yield (
                f'<rect x="{x + 0.75:.2f}" y="{y}" width="{max(width - 1.5, 0.5):.2f}"'
                f' height="{ROW}" rx="4" fill="{fill}"><title>{action}</title></rect>'
                f'<text class="{shade}" x="{x + width / 2:.2f}" y="{y + ROW / 2 + 4}">'
                f"{action.microbatch}</text>"
            )


def _legend(timeline: Timeline, y: float) -> Iterator[str]:
    x = LEFT
    used = {span.action.op for row in timeline.spans for span in row}
    num_chunks = max(len({span.action.stage for span in row}) for row in timeline.spans)
    for op in (op for op in _MEANINGS if op in used):
        for chunk in range(num_chunks):
            yield (
                f'<rect x="{x + 18 * chunk}" y="{y - 11}" width="14" height="14" rx="3"'
                f' fill="{_colour(op, chunk)[0]}"/>'
            )
        x += 18 * num_chunks + 4
        yield f'<text class="start" x="{x}" y="{y}">{_MEANINGS[op]}</text>'
        x += 7 * len(_MEANINGS[op]) + 24
    if num_chunks > 1:
        yield f'<text class="start" x="{x}" y="{y}">(a shade for each chunk)</text>'


def _colour(op: Op, chunk: int) -> tuple[str, str]:
    """The fill of a box, and whether its text is for a dark or a light one."""
    hue, saturation, darkest = _COLOURS[op]
    lightness = min(darkest + 22 * chunk, 86)
    rgb = hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    fill = "#" + "".join(f"{round(255 * part):02x}" for part in rgb)
    return fill, "dark" if chunk == 0 else "light"
