"""A run on paper of fixed orders, which finds the places of the weight gradients."""

from heapq import heapify, heappop, heappush
from math import inf

from parallel3d.pipeline.actions import Action, Op, Program
from parallel3d.pipeline.costs import Costs
from parallel3d.pipeline.rhythm import Due, Orders


class Filling:
    """Run each rank's forwards and input gradients in order, and weight gradients in between.

    A weight gradient runs when nothing else can: because the next input is not there, and will not
    be made to wait for more than ``patience`` of the weight gradient's time; or because the rank
    would keep more than ``limit`` bytes, as ``Timeline.peak_bytes`` of a program without messages.

    Time only goes on, so that ``program`` can be run. ``is_whole`` is False if a rank stopped since
    the limit leaves no way on. (It may not wait until another rank has taken an output: no program
    can say that.) ``peak`` are the most bytes that a rank kept.
    """

    def __init__(
        self, costs: Costs, homes: list[int], orders: Orders, limit: float, patience: float
    ) -> None:
        self.costs, self.homes, self.orders = costs, homes, orders
        self.limit, self.patience = limit, patience
        ranks, stages = range(len(orders)), range(len(homes))
        m = sum(due.is_forward and due.stage == 0 for due in orders[homes[0]])
        self.program: Program = [[] for _ in ranks]
        self.clock = [0.0 for _ in ranks]
        self.peak = 0.0
        self._held = [0.0 for _ in ranks]
        self._output = [*costs.output[:-1], 0]  # the last stage hands on nothing
        self._stages = [[stage for stage in stages if homes[stage] == rank] for rank in ranks]
        self._ready = [[[inf] * m for _ in stages] for _ in range(2)]  # is_forward, stage, k
        self._ready[True][0] = [0.0] * m
        self._at = [0 for _ in ranks]
        self._input_grads = [0 for _ in stages]
        self._weight_grads = [0 for _ in stages]
        self._is_stuck = False
        self._events = [(0.0, True, rank, 0) for rank in ranks]  # releases before wakes
        self._run()

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max(self.clock)

    @property
    def is_whole(self) -> bool:
        """Whether every rank came to its end."""
        return self._at == [len(order) for order in self.orders]

    def _run(self) -> None:
        heapify(self._events)
        while self._events and not self._is_stuck:
            time, _, rank, released = heappop(self._events)
            self._held[rank] -= released
            if self.clock[rank] <= time:
                self._act(rank, time)

    def _act(self, rank: int, time: float) -> None:
        """Start what a rank that is free can start now, if anything."""
        at, order = self._at[rank], self.orders[rank]
        due = order[at] if at < len(order) else None
        coming = inf if due is None else self._ready[due.is_forward][due.stage][due.microbatch]
        is_ready = coming <= time
        if due is not None and not self._fits(rank, due):
            coming = inf
        elif due is not None and is_ready:
            self._at[rank] += 1
            return (self._forward if due.is_forward else self._input_grad)(rank, due, time)
        for stage in self._stages[rank]:
            length = self.costs.weight_grad[stage]
            waits = self._weight_grads[stage] < self._input_grads[stage]
            if waits and time + length - coming <= self.patience * length:
                return self._weight_grad(rank, stage, time)
        self._is_stuck |= is_ready
        return None

    def _fits(self, rank: int, due: Due) -> bool:
        more = self._more(due)
        return more <= 0 or self._held[rank] + more <= self.limit

    def _more(self, due: Due) -> int:
        if due.is_forward:
            return self.costs.saved[due.stage] + self._output[due.stage]
        return self.costs.deferred[due.stage] - self.costs.saved[due.stage]

    def _forward(self, rank: int, due: Due, time: float) -> None:
        stage, k = due.stage, due.microbatch
        self._keep(rank, self._more(due))
        end = self._do(rank, Action(stage, Op.FORWARD, k), time, self.costs.forward[stage])
        if stage:
            heappush(self._events, (end, False, self.homes[stage - 1], self._output[stage - 1]))
        last = stage + 1 == len(self.homes)
        self._hand(rank, Due(False, stage, k) if last else Due(True, stage + 1, k), end)

    def _input_grad(self, rank: int, due: Due, time: float) -> None:
        stage, k = due.stage, due.microbatch
        self._keep(rank, self._more(due))
        end = self._do(rank, Action(stage, Op.INPUT_GRAD, k), time, self.costs.input_grad[stage])
        self._input_grads[stage] += 1
        if stage:
            self._hand(rank, Due(False, stage - 1, k), end)

    def _weight_grad(self, rank: int, stage: int, time: float) -> None:
        k = self._weight_grads[stage]
        self._weight_grads[stage] += 1
        self._do(rank, Action(stage, Op.WEIGHT_GRAD, k), time, self.costs.weight_grad[stage])
        self._held[rank] -= self.costs.deferred[stage]

    def _keep(self, rank: int, more: int) -> None:
        self._held[rank] += more
        self.peak = max(self.peak, self._held[rank])

    def _do(self, rank: int, action: Action, start: float, length: float) -> float:
        self.program[rank].append(action)
        self.clock[rank] = start + length
        heappush(self._events, (self.clock[rank], True, rank, 0))
        return self.clock[rank]

    def _hand(self, rank: int, due: Due, time: float) -> None:
        """Let the rank of what follows have its input, and look at it when it arrives."""
        home = self.homes[due.stage]
        arrival = time + self.costs.comm * (home != rank)
        self._ready[due.is_forward][due.stage][due.microbatch] = arrival
        heappush(self._events, (arrival, True, home, 0))
