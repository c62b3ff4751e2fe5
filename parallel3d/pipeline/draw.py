"""Draw timelines as text for a terminal; ``svg`` draws them for a page."""

from collections.abc import Sequence
from typing import NamedTuple

from parallel3d.pipeline.actions import Action
from parallel3d.pipeline.simulate import Span, Timeline


class Panel(NamedTuple):
    """A timeline under its title; ``messages`` are each rank's times in sends and receives."""

    title: str
    timeline: Timeline
    messages: Sequence[Sequence[Span]] = ()


def summary(timeline: Timeline) -> str:
    """One line: the time a step takes, what a rank idles of it, and the activations it keeps."""
    return (
        f"makespan {timeline.makespan:.6g}  bubble {timeline.bubble:.6g}  peak {timeline.peak:.6g}"
    )


def text(timeline: Timeline, columns: int | None = None) -> str:
    """Draw one row a rank, time to the right, a dot for idle; folded to ``columns`` if given.

    A computation is shown by its op and microbatch, with its stage in front if ranks hold several;
    one that is too short for that by its op, or not at all.
    """
    return side_by_side([Panel("", timeline)], columns)


def side_by_side(panels: Sequence[Panel], columns: int | None = None) -> str:
    """Draw timelines under each other at one scale; folded together, as ``text`` is."""
    timelines = [panel.timeline for panel in panels]
    spans = [span for timeline in timelines for row in timeline.spans for span in row]
    if not spans:
        return ""
    chunked = has_chunks(timelines[0])
    widest = max(len(_label(span.action, chunked)) for span in spans)
    scale = (widest + 1) / typical(timelines)  # characters per unit of time
    width = round(max(timeline.makespan for timeline in timelines) * scale)
    count = max(len(timeline.spans) for timeline in timelines)
    names = [f"rank {rank}".ljust(len(f"rank {count - 1}")) + "  " for rank in range(count)]
    step = max(1, width) if columns is None else max(widest + 1, columns - len(names[0]))
    drawn = [(panel.title, _rows(panel.timeline, scale, chunked)) for panel in panels]
    blocks = []
    for at in range(0, width, step):
        for title, rows in drawn:
            lines = [name + row[at : at + step] for name, row in zip(names, rows, strict=True)]
            head = [title] if title else []
            blocks.append("\n".join([*head, *(line.rstrip() for line in lines)]))
    return "\n\n".join(blocks)


def typical(timelines: Sequence[Timeline]) -> float:
    """A duration that three of four computations have at least: it sets the scale of a picture."""
    times = sorted(
        span.end - span.start
        for timeline in timelines
        for row in timeline.spans
        for span in row
        if span.end > span.start
    )
    return times[(len(times) - 1) // 4] if times else 1.0


def has_chunks(timeline: Timeline) -> bool:
    """Whether ranks hold several stages."""
    stages = {span.action.stage for row in timeline.spans for span in row}
    return len(stages) > len(timeline.spans)


def _rows(timeline: Timeline, scale: float, chunked: bool) -> list[str]:
    rows = []
    for spans in timeline.spans:
        line = "." * round(timeline.makespan * scale)
        for action, start, end in spans:
            a, b = round(start * scale), round(end * scale)
            line = line[:a] + _cell(action, chunked, b - a) + line[b:]
        rows.append(line)
    return rows


def _cell(action: Action, chunked: bool, width: int) -> str:
    label = _label(action, chunked)
    return (label if len(label) <= width else action.op.value[:width]).ljust(width)


def _label(action: Action, chunked: bool) -> str:
    return str(action) if chunked else f"{action.op.value}{action.microbatch}"
