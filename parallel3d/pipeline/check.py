"""What a program must be before it is worth running: complete, ascending, each stage at home."""

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
    it; no rank sends to itself. Whether it ends, and both ends of each channel agree on its order,
    is for ``simulate`` to find.
    """
    rules = Dependencies(program)
    _check_stages(program, rules)
    _check_microbatches(program, rules)
    for action, rank in rules.rank_of.items():
        ends = [send_of(action)] if action.op in RECEIVES else []
        for need in [*ends, *rules.needs(action)]:
            if need not in rules.rank_of:
                hint = ": write all messages or none" if need.op in SENDS | RECEIVES else ""
                raise ValueError(f"{action} on rank {rank} needs {need}, which is on no rank{hint}")
    _check_messages(program, rules)
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
    of_stage: dict[int, list[Action]] = {stage: [] for stage in rules.home}
    for action in (action for actions in program for action in actions):
        of_stage[action.stage].append(action)
    for kind in (_FORWARD, _INPUT_GRAD, _WEIGHT_GRAD) if is_training else (_FORWARD,):
        for stage, actions in of_stage.items():
            order = [action for action in actions if action.op in kind]
            for one, other in pairwise(order):
                if one.microbatch >= other.microbatch:
                    raise ValueError(
                        f"rank {rules.home[stage]} runs {one} before {other}: the microbatches of"
                        " a stage must ascend, or its gradients would depend on the schedule"
                    )
            # They ascend, so the first that is not its own number shows which one is missing.
            numbers = [action.microbatch for action in order]
            gap = next((at for at, number in enumerate(numbers) if at != number), len(numbers))
            if gap < num_microbatches:
                names = " or ".join(f"{stage}{op}{gap}" for op in sorted(kind))
                raise ValueError(f"the program has no {names}")


def _check_messages(program: Program, rules: Dependencies) -> None:
    for rank, actions in enumerate(program):
        for action in actions:
            if action.op in SENDS and rules.rank_of[receive_of(action)] == rank:
                raise ValueError(
                    f"rank {rank} sends to itself for {receive_of(action)}: leave both ends out"
                )
