"""Run a program on paper: prove that it ends; say when each action runs and what a rank keeps.

The proof is for the strictest world. One communicator per (sender, receiver, activations or
gradients) delivers in order, and a send ends only when its receive is reached: posted, and first of
those that its channel has not yet served. Time is kinder, as on a device: a posted send does not
hold up the computes behind it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from parallel3d.pipeline.actions import COMPUTE, SENDS, Action, Op, Program, show_actions
from parallel3d.pipeline.check import check
from parallel3d.pipeline.costs import Costs
from parallel3d.pipeline.dependencies import Dependencies, receive_of
from parallel3d.pipeline.memory import Bytes, Span, peak_bytes, peak_count

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

    Raises ValueError for what ``check`` refuses, and if the program cannot finish: then the message
    names who waits for whom.
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
    run = _Run(program, rules, durations, comm)
    run.run()
    counts = [peak_count(actions) / num_chunks for actions in program]
    held = [peak_bytes(spans, Bytes(*sizes), rules, run.done) for spans in run.spans]
    return Timeline(run.spans, counts, held)


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


class _Run:
    """A walk over the ranks, each as far as it comes, until all have ended or none can move."""

    def __init__(
        self, program: Program, rules: Dependencies, durations: dict[Op, list[float]], comm: float
    ) -> None:
        self.program, self.rules, self.durations, self.comm = program, rules, durations, comm
        self.at = [0] * len(program)
        self.clock = [0.0] * len(program)
        self.done: dict[Action, float] = {}  # when the result of an action is there for its reader
        self.free: dict[tuple[int, int, Op], float] = {}  # when a channel can take its next message
        self.spans: list[list[Span]] = [[] for _ in program]

    def run(self) -> list[list[Span]]:
        moved = True
        while moved:
            moved = max(map(self._advance, range(len(self.program))), default=False)
        stuck = [rank for rank, actions in enumerate(self.program) if self.at[rank] < len(actions)]
        if stuck:
            raise ValueError(self._waiting(stuck[0]))
        return self.spans

    def _advance(self, rank: int) -> bool:
        start, actions = self.at[rank], self.program[rank]
        while self.at[rank] < len(actions):
            action = actions[self.at[rank]]
            needs = self.rules.needs(action)
            if any(need not in self.done for need in needs):
                break
            self._perform(rank, action, needs)
            self.at[rank] += 1
        return self.at[rank] > start

    def _perform(self, rank: int, action: Action, needs: list[Action]) -> None:
        start = max([self.clock[rank], *(self._arrival(need, rank) for need in needs)])
        if action.op in COMPUTE:
            self.clock[rank] = start + self.durations[action.op][action.stage]
            self.spans[rank].append(Span(action, start, self.clock[rank]))
            self.done[action] = self.clock[rank]
        elif action.op in SENDS:
            channel = (rank, self.rules.rank_of[receive_of(action)], action.op)
            self.free[channel] = max(start, self.free.get(channel, 0.0)) + self.comm
            self.done[action] = self.free[channel]
        else:
            self.done[action] = self.clock[rank]

    def _arrival(self, need: Action, rank: int) -> float:
        """When ``rank`` has what it needs; in a compute-only program results of others travel."""
        is_far = need.op in COMPUTE and self.rules.rank_of[need] != rank
        return self.done[need] + self.comm * is_far

    def _waiting(self, rank: int) -> str:
        """Follow who waits for whom until a rank comes twice, and tell that circle."""
        chain: dict[int, str] = {}
        while rank not in chain:
            action = self.program[rank][self.at[rank]]
            need = next(need for need in self.rules.needs(action) if need not in self.done)
            chain[rank] = f"rank {rank} at {action} waits for {need}"
            rank = self.rules.rank_of[need]
        circle = list(chain)[list(chain).index(rank) :]
        lines = ["program cannot finish: " + ", ".join(chain[rank] for rank in circle)]
        for rank in circle:
            at, actions = self.at[rank], self.program[rank]
            before = show_actions(actions[max(0, at - 3) : at])
            lines.append(f"  rank {rank}: {before} >>> {actions[at]}")
        return "\n".join(lines)
