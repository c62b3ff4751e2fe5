"""Passes: functions from a program to a program.

``split_backward`` makes zero-bubble schedules; ``add_communication`` and ``add_reduce`` turn
computes into all that a rank does. ``lower`` is the road from a schedule to what is executed.
"""

from collections import deque

from parallel3d.pipeline.actions import Action, Op, Program, Schedule, show_actions
from parallel3d.pipeline.dependencies import Dependencies, receive_of
from parallel3d.pipeline.simulate import simulate

Channel = tuple[int, int, Op]  # sending rank, receiving rank, the op that sends

_COMPLETES = frozenset({Op.BACKWARD, Op.WEIGHT_GRAD})


def split_backward(actions: list[Action], delay: int) -> list[Action]:
    """Turn each B of a rank into I; after each I but the first ``delay``, run the oldest W.

    >>> from parallel3d.pipeline.actions import parse, show_actions
    >>> show_actions(split_backward(parse("0F0 0B0 0F1 0B1")[0], delay=1))
    '0F0 0I0 0F1 0I1 0W0 0W1'
    """
    out: list[Action] = []
    due: deque[Action] = deque()
    for action in actions:
        if action.op is not Op.BACKWARD:
            out.append(action)
            continue
        out.append(action._replace(op=Op.INPUT_GRAD))
        due.append(action._replace(op=Op.WEIGHT_GRAD))
        if len(due) > delay:
            out.append(due.popleft())
    return [*out, *due]


def add_reduce(program: Program, each: bool = False) -> Program:
    """Put REDUCE directly before the action that completes a stage's gradients.

    That is the stage's last B (W where the backward is split), or with ``each`` every one: from
    there on the stage's units are reduced as their gradients complete. A program that has REDUCE
    keeps them where they are. Raises ValueError, naming the stage, if one would then reduce another
    number of times, or at other gradients.
    """
    given = any(action.op is Op.REDUCE for actions in program for action in actions)
    return [(_check_reduce if given else _add_reduce)(actions, each) for actions in program]


def _add_reduce(actions: list[Action], each: bool) -> list[Action]:
    last = {action.stage: action for action in actions if action.op in _COMPLETES}
    out: list[Action] = []
    for action in actions:
        if action.op in _COMPLETES and (each or action == last[action.stage]):
            out.append(action._replace(op=Op.REDUCE))
        out.append(action)
    return out


def _check_reduce(actions: list[Action], each: bool) -> list[Action]:
    for stage in sorted({action.stage for action in actions}):
        own = [a for a in actions if a.stage == stage and a.op in _COMPLETES | {Op.REDUCE}]
        right = _add_reduce([action for action in own if action.op in _COMPLETES], each)
        if own != right:
            raise ValueError(
                f"the gradients of stage {stage} are completed and reduced by {show_actions(own)},"
                f" but that must be {show_actions(right)}: put REDUCE there, or leave it out"
            )
    return actions


def add_communication(schedule: Schedule, early: int = 1) -> Program:
    """Put a SEND after each compute whose result another rank needs, and its RECV on that rank.

    A RECV is posted ``early`` computes before the one that needs it; sooner where its sender would
    otherwise wait for ever, and where the channel's order asks for it: both ends post in the
    sender's order. So the program ends even where a send blocks until its receive is reached. The
    RECV of a gradient stands behind the SEND of the activation whose shape it has. Neighbouring
    stages on one rank hand over without a message.
    """
    if early < 0:
        raise ValueError(f"early = {early}: a receive is posted 0 or more computes before its use")
    return _Lowering(schedule, early).run()


def lower(schedule: Schedule, *, early: int = 1, each: bool = False) -> Program:
    """All passes: what a pipeline rank executes in one step."""
    return add_reduce(add_communication(schedule, early), each)


class _Lowering:
    """A walk in which a send blocks; where all ranks wait, a blocked send's receive is posted."""

    def __init__(self, schedule: Schedule, early: int) -> None:
        self.program, self.early = schedule.program, early
        self.rules = Dependencies(schedule.program, is_lowered=True)
        self.out: Program = [[] for _ in schedule.program]
        self.done: set[Action] = set()
        self.sending: dict[int, Action] = {}  # the send at which a rank stands
        self.unposted: dict[Channel, deque[Action]] = {}  # receives in the sender's order
        self.channel: dict[Action, Channel] = {}  # by receive
        for rank, actions in enumerate(schedule.program):
            for send in filter(None, map(self.rules.send_after, actions)):
                receive = receive_of(send)
                channel = self.channel[receive] = (rank, self.rules.home[receive.stage], send.op)
                self.unposted.setdefault(channel, deque()).append(receive)

    def run(self) -> Program:
        at = [0] * len(self.program)
        while any(map(self._is_busy, range(len(at)), at)):
            before = len(self.done)
            at = [self._advance(rank, start) for rank, start in enumerate(at)]
            if len(self.done) > before:
                continue
            if not self.sending:
                simulate(self.program)  # says who waits for whom
            self._post(receive_of(self.sending[min(self.sending)]))
        return self.out

    def _is_busy(self, rank: int, at: int) -> bool:
        return at < len(self.program[rank]) or rank in self.sending

    def _advance(self, rank: int, at: int) -> int:
        """Run one rank from its compute number ``at`` as far as it comes; return where it stops."""
        actions = self.program[rank]
        while True:
            if rank in self.sending:
                if receive_of(self.sending[rank]) not in self.done:
                    return at
                self._append(rank, self.sending.pop(rank))
            if at == len(actions):
                return at
            for coming in actions[at : at + self.early + 1]:
                self._post(self.rules.receive_before(coming))
            action = actions[at]
            if any(need not in self.done for need in self.rules.needs(action)):
                return at
            self._append(rank, action)
            at += 1
            send = self.rules.send_after(action)
            if send is not None:
                self.sending[rank] = send

    def _post(self, receive: Action | None) -> None:
        """Post a receive after those sooner on its channel, as far as their shapes are known."""
        while receive is not None and receive not in self.done:
            channel = self.channel[receive]
            queue = self.unposted[channel]
            if any(need not in self.done for need in self.rules.needs(queue[0])):
                return
            self._append(channel[1], queue.popleft())

    def _append(self, rank: int, action: Action) -> None:
        self.out[rank].append(action)
        self.done.add(action)
