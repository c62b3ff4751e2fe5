"""The programs of a run, made and proved when first needed, by number of microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..pipeline.actions import Action, Op, Program, Schedule, show
from ..pipeline.auto import Choice
from ..pipeline.passes import add_communication, lower
from ..pipeline.program_file import given_program, read_program
from ..pipeline.schedules import build, forwards_of, forwards_over
from ..pipeline.simulate import Timeline, simulate
from ..topology import Axis


@dataclass(frozen=True)
class Source:
    """Where programs come from.

    ``training`` and ``evaluation`` give the computes of a step of so many microbatches. ``lowered``
    is a whole program for ``num_microbatches``, messages and all, where the user gave one.
    """

    name: str
    num_microbatches: int
    training: Callable[[int], Schedule]
    evaluation: Callable[[int], Schedule]
    lowered: Program | None = None


def named(name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None) -> Source:
    """A schedule by its name."""
    make = partial(build, name, num_ranks, num_chunks=num_chunks)

    def evaluate(count: int) -> Schedule:
        return forwards_of(make(count))

    return Source(name, num_microbatches, make, evaluate)


def chosen(choice: Choice, num_microbatches: int) -> Source:
    """What ``auto`` took."""

    def evaluate(count: int) -> Schedule:
        return forwards_over(choice.make(num_microbatches), count)

    return Source(choice.name, num_microbatches, choice.make, evaluate)


def given(
    schedule: str | Program,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None,
    each: bool = False,
) -> Source:
    """A program of the user's own, or the path of one; ``each`` as ``Programs`` has it."""
    if isinstance(schedule, str):
        own, name = read_program(schedule, num_ranks, each), schedule
    else:
        own, name = given_program(schedule, num_ranks, each), "of actions"
    for key, asked, has in (
        ("num_microbatches", num_microbatches, own.num_microbatches),
        ("num_chunks", num_chunks or own.schedule.num_chunks, own.schedule.num_chunks),
    ):
        if asked != has:
            raise ValueError(
                f"pipeline.{key} = {asked}, but the program of pipeline.schedule ({name}) has "
                f"{has}: set pipeline.{key}={has}"
            )

    def train(count: int) -> Schedule:
        if count != own.num_microbatches:
            raise ValueError(
                f"{count} microbatches, but the program of pipeline.schedule ({name}) is for "
                f"{own.num_microbatches}: give a step that many"
            )
        return own.schedule

    evaluate = partial(forwards_over, own.schedule)
    return Source(name, own.num_microbatches, train, evaluate, own.lowered)


class Programs:
    """This rank's actions of a training or evaluation step of ``m`` microbatches.

    Each is simulated before its first use, which proves that it ends; making the default training
    program at once refuses a schedule before anything is sent. ``each``: gradients are reduced in
    each microbatch, not once a step.
    """

    def __init__(self, source: Source, pp: Axis, each: bool = False) -> None:
        self.source, self.pp, self.each = source, pp, each
        self.num_microbatches = source.num_microbatches
        self.rank_of_stage = source.training(self.num_microbatches).rank_of_stage
        self._made: dict[tuple[int, bool, bool], Program] = {}
        self.whole(self.num_microbatches)

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are actions of their own."""
        whole = self.whole(self.num_microbatches)
        return any(action.op is Op.WEIGHT_GRAD for actions in whole for action in actions)

    @property
    def num_stages(self) -> int:
        """Of the whole model."""
        return len(self.rank_of_stage)

    def timeline(self) -> Timeline:
        """A training step on paper, as if all stages cost the same."""
        return simulate(self.whole(self.num_microbatches))

    def whole(self, num_microbatches: int, training: bool = True, ahead: bool = True) -> Program:
        """All ranks' actions. ``ahead``: receives are posted one compute before they are needed.

        That needs their shapes; a step with an input of new shapes runs without.
        """
        key = num_microbatches, training, ahead
        if key not in self._made:
            program = self._make(*key)
            simulate(program)
            self._made[key] = program
        return self._made[key]

    def mine(
        self, num_microbatches: int, training: bool = True, ahead: bool = True
    ) -> list[Action]:
        """This rank's actions."""
        return self.whole(num_microbatches, training, ahead)[self.pp.rank]

    def text(self) -> str:
        """The training program as executed, one line per pipeline rank."""
        return show(self.whole(self.num_microbatches)) + "\n"

    def _make(self, num_microbatches: int, training: bool, ahead: bool) -> Program:
        source, early = self.source, int(ahead)
        if not training:
            return add_communication(source.evaluation(num_microbatches), early=early)
        schedule = source.training(num_microbatches)
        if source.lowered is not None and ahead:
            return source.lowered
        return lower(schedule, early=early, each=self.each)
