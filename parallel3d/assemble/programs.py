"""The programs of a run, made and proved when first needed, by number of microbatches."""

from __future__ import annotations

from ..pipeline.actions import Action, Op, Program, show
from ..pipeline.passes import add_communication, lower
from ..pipeline.schedules import build, forward_only
from ..pipeline.simulate import Timeline, simulate
from ..topology import Axis


class Programs:
    """This rank's actions of a training or evaluation step of ``m`` microbatches.

    Each is simulated before its first use, which proves that it ends; making the default training
    program at once refuses a schedule before anything is sent.
    """

    def __init__(
        self, schedule: str, pp: Axis, num_chunks: int | None, num_microbatches: int
    ) -> None:
        first = build(schedule, pp.size, num_microbatches, num_chunks)
        self.schedule, self.pp, self.num_chunks = schedule, pp, num_chunks
        self.num_microbatches = num_microbatches
        self.rank_of_stage = first.rank_of_stage
        self._made: dict[tuple[int, bool, bool], Program] = {}
        self.timeline: Timeline = simulate(self.whole(num_microbatches))

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients are actions of their own."""
        return any(action.op is Op.WEIGHT_GRAD for action in self.mine(self.num_microbatches))

    @property
    def num_stages(self) -> int:
        """Of the whole model."""
        return len(self.rank_of_stage)

    def whole(self, num_microbatches: int, training: bool = True, ahead: bool = True) -> Program:
        """All ranks' actions. ``ahead``: receives are posted one compute before they are needed.

        That needs their shapes; a step with an input of new shapes runs without.
        """
        key = num_microbatches, training, ahead
        if key not in self._made:
            make = build if training else forward_only
            schedule = make(self.schedule, self.pp.size, num_microbatches, self.num_chunks)
            early = 1 if ahead else 0
            add = lower if training else add_communication
            program = add(schedule, early=early)
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
