"""What a rank keeps on paper: activations in microbatches, and everything in bytes.

Bytes are of three kinds. ``saved`` live from a stage's forward until its B or I ends, ``deferred``
from the end of an I until its W ends, and an ``output`` until its SEND is done; where no message
takes it, until the next stage's forward has ended. The last stage hands on nothing.
"""

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from parallel3d.pipeline.actions import Action, Op, Program
from parallel3d.pipeline.dependencies import Dependencies
from parallel3d.pipeline.walk import Span


class Bytes(NamedTuple):
    """What one microbatch keeps, for each stage."""

    saved: Sequence[float]
    deferred: Sequence[float]
    output: Sequence[float]


def peak_count(actions: list[Action]) -> int:
    """The most (stage, microbatch) activations kept at once; a rank without backward keeps none."""
    frees = {Op.BACKWARD, Op.WEIGHT_GRAD} if _trains(actions) else {Op.FORWARD}
    return _most_held(actions, frees)


def in_flight(program: Program) -> list[int]:
    """The most microbatches whose activations each stage keeps at once, stage after stage."""
    return [peak_count(actions) for actions in _by_stage(program)]


def most_saved(program: Program) -> list[int]:
    """The most that each stage has at once between their forward and their input gradient."""
    frees = {Op.BACKWARD, Op.INPUT_GRAD}
    return [_most_held(actions, frees) for actions in _by_stage(program)]


def _by_stage(program: Program) -> list[list[Action]]:
    own: dict[int, list[Action]] = {}
    for action in (action for actions in program for action in actions):
        own.setdefault(action.stage, []).append(action)
    return [own[stage] for stage in sorted(own)]


def _most_held(actions: list[Action], frees: set[Op]) -> int:
    """The most that are kept from their forward until an op that frees them has ended."""
    held = most = 0
    for action in actions:
        held += action.op is Op.FORWARD
        most = max(most, held)
        held -= action.op in frees
    return most


def peak_bytes(
    spans: list[Span], sizes: Bytes, rules: Dependencies, done: Mapping[Action, float]
) -> float:
    """The most bytes that a rank keeps at once; ``done`` says when every action of all ranks is."""
    is_training = _trains([span.action for span in spans])
    held = peak = 0.0
    outputs: list[tuple[float, float]] = []  # when one is gone, and its bytes: a heap
    for action, start, _ in spans:
        stage, op, _ = action
        while outputs and outputs[0][0] <= start:
            held -= heappop(outputs)[1]
        if op is Op.FORWARD:
            held += sizes.saved[stage]
            taken_by = _taker(action, rules)
            if taken_by in done:
                heappush(outputs, (done[taken_by], sizes.output[stage]))
                held += sizes.output[stage]
        elif op is Op.INPUT_GRAD:
            held += sizes.deferred[stage] - sizes.saved[stage]
        peak = max(peak, held)
        if op is Op.BACKWARD or (op is Op.FORWARD and not is_training):
            held -= sizes.saved[stage]
        elif op is Op.WEIGHT_GRAD:
            held -= sizes.deferred[stage]
    return peak


def _taker(forward: Action, rules: Dependencies) -> Action:
    """The action after which an output is no longer needed where it was made."""
    send = rules.send_after(forward) if rules.is_lowered else None
    return send or forward._replace(stage=forward.stage + 1)


def _trains(actions: list[Action]) -> bool:
    return any(action.op in (Op.BACKWARD, Op.WEIGHT_GRAD) for action in actions)
