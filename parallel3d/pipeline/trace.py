"""A measured step of all ranks: as a file that Perfetto and Chrome open, and beside the simulation.

The file is JSON in the Trace Event Format: one process a rank, its spans named by their actions,
categories by what the time went into.
"""

import json
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from parallel3d.pipeline.actions import Op, Program, parse, parse_action, show
from parallel3d.pipeline.check import check
from parallel3d.pipeline.costs import Costs
from parallel3d.pipeline.simulate import Span, Timeline, simulate

CATEGORIES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRAD: "input gradient",
    Op.WEIGHT_GRAD: "weight gradient",
}
WAIT, MESSAGE = "wait", "message"


class Lane(NamedTuple):
    """What one rank did in a step; times in seconds of a clock that all ranks share.

    ``pp`` is its pipeline rank and ``replica`` the number of its pipeline. ``waits`` name the
    computation that waited, ``messages`` are the host's part of sends and receives.
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


def measured(trace: Trace, replica: int = 0) -> Timeline:
    """The step of one pipeline, in milliseconds from its first computation on."""
    lanes = _pipeline(trace, replica)
    zero = min(lane.computes[0].start for lane in lanes)
    return Timeline([_shifted(lane.computes, zero) for lane in lanes], [], [])


def messages(trace: Trace, replica: int = 0) -> list[list[Span]]:
    """When the hosts of one pipeline were busy with messages, on the scale of ``measured``."""
    lanes = _pipeline(trace, replica)
    zero = min(lane.computes[0].start for lane in lanes)
    return [_shifted(lane.messages, zero) for lane in lanes]


def simulated(trace: Trace, replica: int = 0) -> Timeline:
    """The program on paper, in milliseconds, each action as long as it was measured on average.

    The mean is over the microbatches of a stage. A message takes the time that was measured before
    the run, if it was, else none.
    """
    means = mean_times(measured(trace, replica))
    count = len(check(trace.program).home)
    forward, backward, input_grad, weight_grad = (
        [means.get((stage, op), 0.0) for stage in range(count)] for op in CATEGORIES
    )
    whole = [max(b, i + w) for b, i, w in zip(backward, input_grad, weight_grad, strict=True)]
    first = [b - w for b, w in zip(whole, weight_grad, strict=True)]
    comm = 1e3 * trace.costs.comm if trace.costs else 0.0
    return simulate(trace.program, f=forward, i=first, w=weight_grad, comm=comm)


def mean_times(timeline: Timeline) -> dict[tuple[int, Op], float]:
    """The mean time of each stage's computations of one kind."""
    times: dict[tuple[int, Op], list[float]] = {}
    for spans in timeline.spans:
        for action, start, end in spans:
            times.setdefault((action.stage, action.op), []).append(end - start)
    return {key: fmean(values) for key, values in times.items()}


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


def _pipeline(trace: Trace, replica: int) -> list[Lane]:
    """The lanes of one pipeline, by pipeline rank."""
    lanes = [lane for lane in trace.lanes if lane.replica == replica]
    return sorted(lanes, key=lambda lane: lane.pp)


def _shifted(spans: Sequence[Span], zero: float) -> list[Span]:
    """In milliseconds from ``zero`` seconds on."""
    return [Span(action, 1e3 * (start - zero), 1e3 * (end - zero)) for action, start, end in spans]
