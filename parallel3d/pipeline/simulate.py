"""Run a program on paper: prove that it ends; say when each action runs and what a rank keeps."""

from collections.abc import Sequence
from typing import NamedTuple

from parallel3d.pipeline.actions import Op, Program
from parallel3d.pipeline.check import check
from parallel3d.pipeline.costs import Costs
from parallel3d.pipeline.memory import Bytes, peak_bytes, peak_count
from parallel3d.pipeline.walk import Span, Walk

Amounts = float | Sequence[float]


class Timeline(NamedTuple):
    """When every compute of a program runs, and the most that each rank keeps.

    ``spans[r]`` are rank r's computes in order. ``peaks[r]`` counts activations, in microbatches of
    all its stages: one of a single chunk is 1/v. An activation lives from its forward to its weight
    gradient. ``peak_bytes[r]`` are bytes: of activations, of what weight gradients wait with, and
    of outputs not yet sent.
    """

    spans: list[list[Span]]
    peaks: list[float]
    peak_bytes: list[float]

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @property
    def idle(self) -> list[float]:
        """Each rank's makespan less its busy time."""
        busy = (sum(span.end - span.start for span in spans) for spans in self.spans)
        return [self.makespan - time for time in busy]

    @property
    def idle_shares(self) -> list[float]:
        """The share of the makespan in which each rank computes nothing."""
        return [idle / self.makespan if self.makespan else 0.0 for idle in self.idle]

    @property
    def bubble(self) -> float:
        """The idle time of the rank that waits most; with equal costs all wait alike."""
        return max(self.idle, default=0.0)

    @property
    def peak(self) -> float:
        """The largest of ``peaks``."""
        return max(self.peaks, default=0.0)


def simulate(
    program: Program,
    *,
    f: Amounts = 1.0,
    i: Amounts = 1.0,
    w: Amounts = 1.0,
    comm: float = 0.0,
    saved: Amounts = 0,
    deferred: Amounts = 0,
    output: Amounts = 0,
) -> Timeline:
    """Run a program, compute-only or lowered, and return its timeline.

    ``f``, ``i`` and ``w`` are the times of forward, input gradient and weight gradient; a whole
    backward takes ``i + w``. ``saved``, ``deferred`` and ``output`` are the bytes of one microbatch
    that wait for the input gradient, for the weight gradient and for the next stage. A number is
    that of all stages of a rank, so that a chunk of ``v`` has 1/v of it; a sequence gives each
    stage its own. ``comm`` is the time of one message.

    Raises ValueError for what ``check`` refuses, and if the program cannot finish, as told by
    ``Walk``: then the message names who waits for whom.
    """
    rules = check(program)
    num_stages = len(rules.home)
    num_chunks = max(1, num_stages // max(1, len(program)))
    forward, input_grad, weight_grad, *sizes = (
        _per_stage(amounts, num_stages, num_chunks)
        for amounts in (f, i, w, saved, deferred, output)
    )
    durations = {
        Op.FORWARD: forward,
        Op.INPUT_GRAD: input_grad,
        Op.WEIGHT_GRAD: weight_grad,
        Op.BACKWARD: [a + b for a, b in zip(input_grad, weight_grad, strict=True)],
    }
    walk = Walk(program, rules, durations, comm)
    walk.run()
    counts = [peak_count(actions) / num_chunks for actions in program]
    held = [peak_bytes(spans, Bytes(*sizes), rules, walk.done) for spans in walk.spans]
    return Timeline(walk.spans, counts, held)


def simulate_costs(program: Program, costs: Costs) -> Timeline:
    """``simulate`` with the times and bytes of measured or counted stages."""
    return simulate(
        program,
        f=costs.forward,
        i=costs.input_grad,
        w=costs.weight_grad,
        comm=costs.comm,
        saved=costs.saved,
        deferred=costs.deferred,
        output=costs.output,
    )


def _per_stage(amounts: Amounts, num_stages: int, num_chunks: int) -> list[float]:
    if isinstance(amounts, int | float):
        return [amounts / num_chunks] * num_stages
    if len(amounts) != num_stages:
        raise ValueError(
            f"{len(amounts)} values for {num_stages} stages: give one a stage, or a number"
        )
    return list(amounts)
