"""A walk over the ranks of a program: it finds when each action runs, or the circle of waiting.

The walk is in the strictest world. One communicator per (sender, receiver, activations or
gradients) delivers in order, and a send ends only when its receive is reached: posted, and first of
those that its channel has not yet served. Time is kinder, as on a device: a posted send does not
hold up the computes behind it.
"""

from collections import deque
from typing import NamedTuple

from parallel3d.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Op, Program, show_actions
from parallel3d.pipeline.dependencies import Dependencies, receive_of, send_of


class Span(NamedTuple):
    """One compute action and when it runs."""

    action: Action
    start: float
    end: float


class Walk:
    """Take each rank as far as it comes, until all have ended or none can move.

    ``durations`` are of each op and stage, ``comm`` of one message; ``program`` is one that
    ``check`` passed. Afterwards ``spans`` are the computes of each rank, and ``done`` says when the
    result of each action is there for its reader.
    """

    def __init__(
        self, program: Program, rules: Dependencies, durations: dict[Op, list[float]], comm: float
    ) -> None:
        self.program, self.rules, self.durations, self.comm = program, rules, durations, comm
        self.at = [0] * len(program)
        self.clock = [0.0] * len(program)
        self.done: dict[Action, float] = {}
        self.free: dict[tuple[int, int, Op], float] = {}  # when a channel can take its next message
        self.spans: list[list[Span]] = [[] for _ in program]
        self.ahead = _ahead(program)
        self.asleep: dict[Action, list[int]] = {}  # the ranks that wait for an action

    def run(self) -> None:
        """Walk to the end. Raises ValueError with the circle of waiting if there is none."""
        ready = deque(range(len(self.program)))
        while ready:
            ready.extend(self._advance(ready.popleft()))
        for stuck in filter(None, map(self._here, range(len(self.program)))):
            raise ValueError(self._circle(stuck))

    def _advance(self, rank: int) -> list[int]:
        """Take one rank as far as it comes; return the ranks that waited for what it has done."""
        woken: list[int] = []
        while (action := self._here(rank)) is not None:
            needs = self.rules.needs(action)
            cause = next(filter(None, map(self._missing, needs)), None)
            if cause is not None:
                self.asleep.setdefault(cause, []).append(rank)
                break
            self._perform(rank, action, needs)
            self.at[rank] += 1
            woken += self.asleep.pop(action, [])
        return woken

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

    def _missing(self, need: Action) -> Action | None:
        """What must be done before a need is met: itself, or the message ahead of a receive."""
        if need not in self.done:
            return need
        ahead = self.ahead.get(need)
        send = send_of(ahead) if ahead is not None else None
        return None if send in self.done else send

    def _here(self, rank: int) -> Action | None:
        """The action at which a rank stands."""
        at, actions = self.at[rank], self.program[rank]
        return actions[at] if at < len(actions) else None

    def _circle(self, action: Action) -> str:
        """Follow who waits for whom until an action comes twice, and tell that circle."""
        chain: dict[Action, str] = {}
        while action not in chain:
            chain[action], action = self._reason(action)
        actions = list(chain)
        actions = actions[actions.index(action) :]
        ranks = [self.rules.rank_of[action] for action in actions]
        first = next(n for n, rank in enumerate(ranks) if self._here(rank) == actions[n])
        actions, ranks = actions[first:] + actions[:first], ranks[first:] + ranks[:first]
        told = ", which ".join(chain[action] for action in actions)
        lines = [f"program cannot finish: rank {ranks[0]} at {actions[0]} {told}"]
        for rank in dict.fromkeys(ranks):
            at, line = self.at[rank], self.program[rank]
            before = show_actions(line[max(0, at - 3) : at])
            lines.append(f"  rank {rank}: {before} >>> {self._here(rank) or 'its end'}")
        return "\n".join(lines)

    def _reason(self, action: Action) -> tuple[str, Action]:
        """What keeps an action from being met: in words, and the action that does."""
        rank = self.rules.rank_of[action]
        here = self._here(rank)
        if action == here:
            cause = next(filter(self._missing, self.rules.needs(action)))
        elif action not in self.done and here is not None:
            return f"stands behind {here} on rank {rank}", here
        elif self._missing(action):
            cause = self.ahead[action]
            return f"stands behind {cause} on rank {rank}", cause
        else:
            cause = send_of(action)
        return f"waits for {cause}", cause


def _ahead(program: Program) -> dict[Action, Action]:
    """For each receive the one posted before it on its channel."""
    sender = {action: rank for rank, actions in enumerate(program) for action in actions}
    ahead: dict[Action, Action] = {}
    for actions in program:
        latest: dict[tuple[int, Op], Action] = {}
        for action in actions:
            if action.op in RECEIVES:
                channel = sender[send_of(action)], action.op
                if channel in latest:
                    ahead[action] = latest[channel]
                latest[channel] = action
    return ahead
