"""A measured step of all ranks, and the file of it that Perfetto and Chrome open.

The file is JSON in the Trace Event Format: one process a rank, its spans named by their actions,
with a category for what the time went into.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from parallel3d.pipeline.actions import Op, Program, parse, parse_action, show
from parallel3d.pipeline.costs import Costs
from parallel3d.pipeline.simulate import Span, Timeline

CATEGORIES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRAD: "input gradient",
    Op.WEIGHT_GRAD: "weight gradient",
}
WAIT, MESSAGE = "wait", "message"


class Lane(NamedTuple):
    """What one rank did in a step; times in seconds of a clock that all ranks share.

    ``pp`` is its pipeline rank and ``replica`` the number of its pipeline, -1 on paper. ``waits``
    name the computation that waited, ``messages`` are the host's part of sends and receives.
    """

    name: str
    pp: int
    replica: int
    computes: list[Span]
    waits: list[Span]
    messages: list[Span]


class Trace(NamedTuple):
    """One step of a run: what every rank did, the program it followed, and its predicted costs."""

    run: str
    step: int
    schedule: str
    program: Program
    costs: Costs | None
    lanes: list[Lane]


def lanes_of(timeline: Timeline, name: str, zero: float = 0.0) -> list[Lane]:
    """A timeline in milliseconds as lanes of their own, which begins at ``zero`` seconds."""
    return [
        Lane(f"{name} {rank}", rank, -1, [_seconds(span, zero) for span in spans], [], [])
        for rank, spans in enumerate(timeline.spans)
    ]


def to_json(trace: Trace) -> str:
    """The file's text; ``from_json`` reads it back."""
    events = [event for rank, lane in enumerate(trace.lanes) for event in lane_events(rank, lane)]
    zero = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    for event in events:
        if event["ph"] == "X":
            event["ts"] = round(event["ts"] - zero, 3)
    about = {
        "run": trace.run,
        "step": trace.step,
        "schedule": trace.schedule,
        "program": show(trace.program),
        "costs": trace.costs and trace.costs._asdict(),
        "ranks": [[lane.name, lane.pp, lane.replica] for lane in trace.lanes],
    }
    rows = ",\n".join(json.dumps(event) for event in events)
    head = json.dumps({"displayTimeUnit": "ms", "otherData": about}).removesuffix("}")
    return f'{head},\n"traceEvents": [\n{rows}\n]}}\n'


def lane_events(rank: int, lane: Lane) -> Iterator[dict[str, Any]]:
    """A rank's events: its name, its place from above, and a complete event for each span."""
    for key, value in (
        ("process_name", {"name": lane.name}),
        ("process_sort_index", {"sort_index": rank}),
    ):
        yield {"ph": "M", "pid": rank, "tid": 0, "name": key, "args": value}
    kinds = ((None, lane.computes), (WAIT, lane.waits), (MESSAGE, lane.messages))
    for category, spans in kinds:
        for action, start, end in spans:
            yield {
                "ph": "X",
                "pid": rank,
                "tid": 0,
                "name": f"wait {action}" if category == WAIT else str(action),
                "cat": category or CATEGORIES[action.op],
                "ts": 1e6 * start,
                "dur": round(1e6 * (end - start), 3),
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }


def from_json(text: str) -> Trace:
    """Read what ``to_json`` gives. Raises ValueError for any other text."""
    try:
        content = json.loads(text)
        about = content["otherData"]
        lanes = [Lane(name, pp, replica, [], [], []) for name, pp, replica in about["ranks"]]
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                _read_span(lanes[event["pid"]], event)
        costs = about["costs"] and Costs(**about["costs"])
        program = parse(about["program"])
        return Trace(about["run"], about["step"], about["schedule"], program, costs, lanes)
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"not the timeline of a run: {error!r}") from error


def _read_span(lane: Lane, event: dict[str, Any]) -> None:
    category = event["cat"]
    action = parse_action(event["name"].removeprefix("wait "))
    start = event["ts"] / 1e6
    kept = {WAIT: lane.waits, MESSAGE: lane.messages}.get(category, lane.computes)
    kept.append(Span(action, start, start + event["dur"] / 1e6))


def _seconds(span: Span, zero: float) -> Span:
    return Span(span.action, zero + span.start / 1e3, zero + span.end / 1e3)
