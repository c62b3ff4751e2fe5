"""A program is one list of actions per pipeline rank: data that prints, parses and compares."""

import re
from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """What an action does. ``BACKWARD`` is ``INPUT_GRAD`` and ``WEIGHT_GRAD`` in one."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    REDUCE = "REDUCE"


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD})
SENDS = frozenset({Op.SEND_FORWARD, Op.SEND_BACKWARD})
RECEIVES = frozenset({Op.RECV_FORWARD, Op.RECV_BACKWARD})


class Action(NamedTuple):
    """One instruction: ``2F0`` is stage 2's forward of microbatch 0.

    A message is named by the stage that acts, not by the border: ``0SEND_F3`` hands on the output
    of stage 0, ``1RECV_F3`` posts the receive of stage 1's input; ``1SEND_B3`` returns the gradient
    of that input, ``0RECV_B3`` posts its receive. ``0REDUCE3`` says that from here on stage 0's
    gradients are reduced as they complete, in its weight gradient of microbatch 3.
    """

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"


Program = list[list[Action]]


class Schedule(NamedTuple):
    """The compute actions of every rank, and where each stage lives.

    ``rank_of_stage[s]`` is the rank that holds stage ``s``; each rank holds ``num_chunks`` of them.
    """

    program: Program
    rank_of_stage: list[int]
    num_chunks: int


_ACTION = re.compile(rf"([0-9]+)({'|'.join(op.value for op in Op)})([0-9]+)")


def parse_action(text: str) -> Action:
    """Read what ``str(action)`` prints.

    >>> parse_action("0RECV_B3") == Action(0, Op.RECV_BACKWARD, 3)
    True
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        ops = ", ".join(op.value for op in Op)
        raise ValueError(
            f"{text!r} is not an action: write stage, op and microbatch, as in 0F0 or 1SEND_B3;"
            f" the ops are {ops}"
        )
    stage, op, microbatch = match.groups()
    return Action(int(stage), Op(op), int(microbatch))


def show_actions(actions: list[Action]) -> str:
    """Print the actions of one rank on one line."""
    return " ".join(map(str, actions))


def show(program: Program) -> str:
    """Print a program, one line a rank."""
    return "\n".join(map(show_actions, program))


def parse(text: str) -> Program:
    """Read what ``show`` prints; empty lines and what follows a ``#`` are passed over.

    Raises ValueError with the number of the line, counted from 1, and the word that is no action.
    """
    program: Program = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        try:
            program += [[parse_action(word) for word in words]] if words else []
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return program
