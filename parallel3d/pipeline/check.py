"""What a program must be before it is worth running: complete, ascending, agreed on its order."""

from itertools import pairwise

from parallel3d.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Op, Program
from parallel3d.pipeline.dependencies import Dependencies, receive_of, send_of

_FORWARD = {Op.FORWARD}
_INPUT_GRAD = {Op.BACKWARD, Op.INPUT_GRAD}
_WEIGHT_GRAD = {Op.BACKWARD, Op.WEIGHT_GRAD}


def check(program: Program) -> Dependencies:
    """Raise ValueError, naming the action, unless every rank's list is one that could be run.

    Every action is there once and so is all that it needs; a stage lives on one rank; every
    microbatch passes every stage in ascending order, as the bits of a sum of gradients depend on
    it; the two ends of each channel post the same messages in the same order.
    """
    rules = Dependencies(program)
    _check_stages(program, rules)
    _check_microbatches(program, rules)
    for action, rank in rules.rank_of.items():
        ends = [send_of(action)] if action.op in RECEIVES else []
        for need in [*ends, *rules.needs(action)]:
            if need not in rules.rank_of:
                raise ValueError(f"{action} on rank {rank} needs {need}, which is on no rank")
    _check_channels(program, rules)
    return rules


def _check_stages(program: Program, rules: Dependencies) -> None:
    seen: dict[Action, int] = {}
    for rank, actions in enumerate(program):
        for action in actions:
            if action in seen:
                raise ValueError(f"{action} is on rank {seen[action]} and again on rank {rank}")
            seen[action] = rank
            if rules.home[action.stage] != rank:
                raise ValueError(
                    f"{action} is on rank {rank}, but stage {action.stage} lives on rank"
                    f" {rules.home[action.stage]}: put all actions of a stage on one rank"
                )
    if sorted(rules.home) != list(range(len(rules.home))):
        raise ValueError(f"the stages are {sorted(rules.home)}: number them from 0 without a gap")


def _check_microbatches(program: Program, rules: Dependencies) -> None:
    num_microbatches = 1 + max((action.microbatch for action in rules.rank_of), default=-1)
    ops = {action.op for action in rules.rank_of}
    is_training = bool(ops & COMPUTE - _FORWARD)
    for kind in (_FORWARD, _INPUT_GRAD, _WEIGHT_GRAD) if is_training else (_FORWARD,):
        for stage, rank in rules.home.items():
            order = [a for a in program[rank] if a.stage == stage and a.op in kind]
            for one, other in pairwise(order):
                if one.microbatch >= other.microbatch:
                    raise ValueError(
                        f"rank {rank} runs {one} before {other}: the microbatches of a stage must"
                        " ascend, or its gradients would depend on the schedule"
                    )
            missing = set(range(num_microbatches)) - {action.microbatch for action in order}
            if missing:
                names = " or ".join(f"{stage}{op}{min(missing)}" for op in sorted(kind))
                raise ValueError(f"the program has no {names}")


def _check_channels(program: Program, rules: Dependencies) -> None:
    """Compare the two ends of each channel, which is (sender, receiver, what it carries)."""
    sent: dict[tuple[int, int, str], list[Action]] = {}
    posted: dict[tuple[int, int, str], list[Action]] = {}
    for rank, actions in enumerate(program):
        for action in actions:
            is_forward = action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
            what = "activations" if is_forward else "gradients"
            if action.op in SENDS:
                receive = receive_of(action)
                sent.setdefault((rank, rules.rank_of[receive], what), []).append(receive)
            elif action.op in RECEIVES:
                posted.setdefault((rules.rank_of[send_of(action)], rank, what), []).append(action)
    for channel, receives in sent.items():
        sender, receiver, what = channel
        if sender == receiver:
            raise ValueError(
                f"rank {sender} sends to itself for {receives[0]}: leave both ends out"
            )
        for number, (needed, found) in enumerate(zip(receives, posted[channel], strict=True)):
            if needed != found:
                raise ValueError(
                    f"message {number} of the {what} from rank {sender} to rank {receiver} is sent"
                    f" for {needed}, but the receive posted there is {found}:"
                    " both ends of a channel must keep one order"
                )
