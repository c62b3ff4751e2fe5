"""A program of the user's own: a text file with one line of actions for each pipeline rank."""

from pathlib import Path
from typing import NamedTuple

from parallel3d.pipeline.actions import Op, Program, Schedule, parse
from parallel3d.pipeline.check import check
from parallel3d.pipeline.passes import add_reduce, lower
from parallel3d.pipeline.schedules import from_program
from parallel3d.pipeline.simulate import simulate


class Given(NamedTuple):
    """A program as the user gave it.

    ``schedule`` are its computes. ``lowered`` is all of it, REDUCE added where there is none; None
    if it has no messages, which are then ours to add.
    """

    schedule: Schedule
    num_microbatches: int
    lowered: Program | None


def read_program(path: str | Path, num_ranks: int | None = None, each: bool = False) -> Given:
    """Read a file of actions as ``show`` prints them, such as ``0F0 0F1 0B0``, one line a rank.

    Empty lines and comments behind ``#`` are passed over. Messages are added later, or run as they
    are given, all or none. ``num_ranks`` is how many lines there must be, None for any number;
    ``each`` is where REDUCE goes, as ``add_reduce`` has it.

    Raises ValueError, with the name of the file, for a word that is no action (and its line), for
    what ``given_program`` refuses, and if there is no such file.
    """
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"pipeline.schedule = {str(path)!r} is no file of actions")
    if not Path(path).is_file():
        raise ValueError(
            f"pipeline.schedule = {str(path)!r}: there is no such file; write the actions of each"
            " pipeline rank on a line of it, or take a schedule by its name"
        )
    try:
        return given_program(parse(Path(path).read_text(encoding="utf-8-sig")), num_ranks, each)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def given_program(program: Program, num_ranks: int | None = None, each: bool = False) -> Given:
    """Prove a user's program on paper and tell its parts.

    Raises ValueError for another number of ranks than ``num_ranks``, for what ``check`` refuses
    (an action missing or twice, a stage on two ranks, descending microbatches), for ranks of
    unequally many stages, a program without backward, a REDUCE at the wrong place, and, naming who
    waits for whom, for a program that cannot finish.
    """
    if num_ranks not in (None, len(program)):
        raise ValueError(
            f"lines of actions: {len(program)}, but topology.pp = {num_ranks}: write one for each"
            " pipeline rank"
        )
    rules = check(program)
    schedule = from_program(program)
    if not any(action.op in (Op.BACKWARD, Op.WEIGHT_GRAD) for action in rules.rank_of):
        raise ValueError("a program of forwards alone trains nothing: write the backwards too")
    num_microbatches = 1 + max(action.microbatch for action in rules.rank_of)
    whole = add_reduce(program, each)
    if not rules.is_lowered:
        simulate(lower(schedule))
        return Given(schedule, num_microbatches, None)
    simulate(whole)
    return Given(schedule, num_microbatches, whole)
