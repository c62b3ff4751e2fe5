"""What a run did in a step beside what it should have done, both in milliseconds."""

from collections.abc import Sequence
from statistics import fmean

from parallel3d.pipeline.actions import Op
from parallel3d.pipeline.check import check
from parallel3d.pipeline.simulate import Span, Timeline, simulate
from parallel3d.pipeline.trace import CATEGORIES, Lane, Trace

Means = dict[tuple[int, Op], float]


def measured(trace: Trace, replica: int = 0) -> Timeline:
    """The step of one pipeline, from its first computation on."""
    lanes = _pipeline(trace, replica)
    zero = start_of(trace, replica)
    return Timeline([_shifted(lane.computes, zero) for lane in lanes], [], [])


def messages(trace: Trace, replica: int = 0) -> list[list[Span]]:
    """When the hosts of one pipeline were busy with messages, on the scale of ``measured``."""
    zero = start_of(trace, replica)
    return [_shifted(lane.messages, zero) for lane in _pipeline(trace, replica)]


def simulated(trace: Trace, replica: int = 0) -> Timeline:
    """The program on paper, each action as long as it was measured on average.

    The mean is over the microbatches of a stage in this step. A message takes the time that was
    measured before the run, if it was, else none.
    """
    means = mean_times(measured(trace, replica))
    stages = range(len(check(trace.program).home))
    times = {op: [means.get((stage, op), 0.0) for stage in stages] for op in CATEGORIES}
    # On paper B takes as long as I and W together; where a stage has both kinds, the longer counts.
    halves = zip(times[Op.INPUT_GRAD], times[Op.WEIGHT_GRAD], strict=True)
    whole = [max(b, i + w) for b, (i, w) in zip(times[Op.BACKWARD], halves, strict=True)]
    first = [b - w for b, w in zip(whole, times[Op.WEIGHT_GRAD], strict=True)]
    comm = 1e3 * trace.costs.comm if trace.costs else 0.0
    return simulate(trace.program, f=times[Op.FORWARD], i=first, w=times[Op.WEIGHT_GRAD], comm=comm)


def mean_times(timeline: Timeline) -> Means:
    """The mean time of each stage's computations of one kind."""
    times: dict[tuple[int, Op], list[float]] = {}
    for spans in timeline.spans:
        for action, start, end in spans:
            times.setdefault((action.stage, action.op), []).append(end - start)
    return {key: fmean(values) for key, values in times.items()}


def start_of(trace: Trace, replica: int = 0) -> float:
    """When the first computation of a pipeline started, in seconds of the trace."""
    return min(lane.computes[0].start for lane in _pipeline(trace, replica))


def title(trace: Trace) -> str:
    """What a picture of the trace shows."""
    ranks = len(trace.program)
    count = 1 + max(action.microbatch for action in trace.program[0])
    replicas = len({lane.replica for lane in trace.lanes})
    of = f", one of {replicas} replicas" if replicas > 1 else ""
    return (
        f"{trace.run}, step {trace.step}: {trace.schedule}, {ranks} ranks, {count} microbatches{of}"
    )


def summary(timeline: Timeline) -> str:
    """Makespan, and the bubble: the share of it that a rank idles on average."""
    return f"makespan {timeline.makespan:.4g} ms · bubble {fmean(timeline.idle_shares):.0%}"


def table(measured: Timeline, simulated: Timeline) -> str:
    """Of each stage the mean times and the bubble of its rank, measured and simulated."""
    means = mean_times(measured)
    ops = [op for op in CATEGORIES if any(key[1] is op for key in means)]
    rank_of = {span.action.stage: rank for rank, row in enumerate(measured.spans) for span in row}
    seen, paper = measured.idle_shares, simulated.idle_shares
    rows = [["stage", "rank", *(f"{op} ms" for op in ops), "bubble", "simulated"]]
    for stage, rank in sorted(rank_of.items()):
        times = (f"{means.get((stage, op), 0.0):.3f}" for op in ops)
        rows.append([str(stage), str(rank), *times, f"{seen[rank]:.1%}", f"{paper[rank]:.1%}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    makespan = f"makespan {measured.makespan:.4g} ms, simulated {simulated.makespan:.4g} ms"
    return "\n".join([*lines, makespan])


def _pipeline(trace: Trace, replica: int) -> list[Lane]:
    """The lanes of one pipeline, by pipeline rank."""
    lanes = [lane for lane in trace.lanes if lane.replica == replica]
    return sorted(lanes, key=lambda lane: lane.pp)


def _shifted(spans: Sequence[Span], zero: float) -> list[Span]:
    """In milliseconds from ``zero`` seconds on."""
    return [Span(action, 1e3 * (start - zero), 1e3 * (end - zero)) for action, start, end in spans]
