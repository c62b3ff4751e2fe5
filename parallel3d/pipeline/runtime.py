"""The interpreter: one loop over a rank's actions, one method per op.

Nobody else decides what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from .actions import COMPUTE, Action, Op, show_actions
from .border import Border
from .stage import Stage


class Criterion(Protocol):
    """The end of the last stage: the loss of a microbatch, kept until its backward."""

    def forward(self, microbatch: int, output: Any) -> None:
        """Compute the loss of the model's output."""

    def backward(self, microbatch: int) -> list[Tensor]:
        """Gradients of the model's outputs that need one."""


class Observer(Protocol):
    """Is told what the interpreter does, as it does it."""

    def waits(self, action: Action) -> None:
        """The action's turn has come; what it needs from another rank may not be there yet."""

    def begins(self, action: Action) -> None:
        """A compute action has its input and starts."""

    def ends(self, action: Action) -> None:
        """The action is done."""


@dataclass
class Step:
    """What one run of a program works on.

    Args:
        inputs: x of each microbatch, on the first stage's rank.
        seeds: key of each microbatch's random numbers.
        shapes: for each microbatch a number that stands for the shapes and dtypes of its input.
        training: whether gradients are needed.
        criterion: on the last stage's rank.
    """

    inputs: Sequence[Any]
    seeds: Sequence[int]
    shapes: Sequence[int]
    training: bool
    criterion: Criterion | None
    handed: dict[tuple[str, int, int], Any] = field(default_factory=dict)
    posted: dict[tuple[str, int, int], Callable[[], Any]] = field(default_factory=dict)
    outputs: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    reducing: set[int] = field(default_factory=set)


class Interpreter:
    """Runs the actions of one pipeline rank on its stages.

    Args:
        stages: this rank's, by index.
        num_stages: of the whole model.
        borders: for each stage index ``s`` that this rank shares with another rank, the border
            between ``s - 1`` and ``s``; a border inside the rank has none and hands over directly.
        where: how error notes name this rank.

    Attributes:
        observers: each is told of every action.
    """

    def __init__(
        self, stages: dict[int, Stage], num_stages: int, borders: dict[int, Border], where: str
    ) -> None:
        self.stages, self.num_stages, self.borders, self.where = stages, num_stages, borders, where
        self.observers: list[Observer] = []
        self._compute: dict[Op, Callable[[Step, int, int, Any], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.INPUT_GRAD: self._input_grad,
            Op.WEIGHT_GRAD: self._weight_grad,
        }
        self._move: dict[Op, Callable[[Step, int, int], None]] = {
            Op.SEND_FORWARD: self._send_forward,
            Op.RECV_FORWARD: self._receive_forward,
            Op.SEND_BACKWARD: self._send_backward,
            Op.RECV_BACKWARD: self._receive_backward,
            Op.REDUCE: self._reduce,
        }

    def run(self, actions: Sequence[Action], step: Step) -> None:
        """Do the actions in order; an error says which one, and what came before it."""
        for stage in self.stages.values():
            stage.train(step.training)
        for at, action in enumerate(actions):
            try:
                self._perform(step, action)
            except Exception as error:
                before = show_actions(list(actions[max(0, at - 3) : at]))
                error.add_note(
                    f"{self.where}, action {at} of {len(actions)}: {before} >>> {action}"
                )
                for stage in self.stages.values():
                    stage.clear()
                raise
        for border in self.borders.values():
            border.flush()

    def _perform(self, step: Step, action: Action) -> None:
        for observer in self.observers:
            observer.waits(action)
        index, op, microbatch = action
        if op in COMPUTE:
            given = self._input(step, action)
            for observer in self.observers:
                observer.begins(action)
            self._compute[op](step, index, microbatch, given)
        else:
            self._move[op](step, index, microbatch)
        for observer in self.observers:
            observer.ends(action)

    def _input(self, step: Step, action: Action) -> Any:
        """What a compute works on, once it is there."""
        index, op, microbatch = action
        if op is Op.FORWARD:
            if index == 0:
                return step.inputs[microbatch]
            return self._take(step, "forward", index, microbatch)
        if op is Op.WEIGHT_GRAD or index == self.num_stages - 1:
            return None
        return self._take(step, "backward", index, microbatch)

    def _forward(self, step: Step, index: int, microbatch: int, x: Any) -> None:
        stage = self.stages[index]
        seed = step.seeds[microbatch]
        y = stage.forward(microbatch, x, seed) if step.training else stage.evaluate(x, seed)
        if index < self.num_stages - 1:
            self._give(step, "forward", index + 1, microbatch, y)
        else:
            assert step.criterion is not None
            step.criterion.forward(microbatch, y)

    def _backward(self, step: Step, index: int, microbatch: int, given: Any) -> None:
        gradients = self._output_gradients(step, index, microbatch, given)
        reduce = index in step.reducing
        gradients = self.stages[index].backward(microbatch, gradients, reduce)
        if index > 0:
            self._give(step, "backward", index - 1, microbatch, gradients)

    def _input_grad(self, step: Step, index: int, microbatch: int, given: Any) -> None:
        gradients = self._output_gradients(step, index, microbatch, given)
        gradients = self.stages[index].input_grad(microbatch, gradients)
        if index > 0:
            self._give(step, "backward", index - 1, microbatch, gradients)

    def _weight_grad(self, step: Step, index: int, microbatch: int, given: None) -> None:
        self.stages[index].weight_grad(microbatch, index in step.reducing)

    def _output_gradients(
        self, step: Step, index: int, microbatch: int, given: list[Tensor] | None
    ) -> list[Tensor]:
        """Those that came, or on the last stage those of the loss."""
        if given is not None:
            return given
        assert step.criterion is not None
        return step.criterion.backward(microbatch)

    def _send_forward(self, step: Step, index: int, microbatch: int) -> None:
        y = step.handed.pop(("forward", index + 1, microbatch))
        shape = (step.training, step.shapes[microbatch])
        border = self.borders[index + 1]
        step.outputs[index, microbatch] = border.send_forward(y, shape)

    def _receive_forward(self, step: Step, index: int, microbatch: int) -> None:
        shape = (step.training, step.shapes[microbatch])
        step.posted["forward", index, microbatch] = self.borders[index].post_forward(shape)

    def _send_backward(self, step: Step, index: int, microbatch: int) -> None:
        gradients = step.handed.pop(("backward", index - 1, microbatch))
        self.borders[index].send_backward(gradients)

    def _receive_backward(self, step: Step, index: int, microbatch: int) -> None:
        like = step.outputs.pop((index, microbatch))
        step.posted["backward", index, microbatch] = self.borders[index + 1].post_backward(like)

    def _reduce(self, step: Step, index: int, microbatch: int) -> None:
        step.reducing.add(index)

    def _give(self, step: Step, way: str, index: int, microbatch: int, value: Any) -> None:
        """Leave a value for the neighbour stage: on this rank, or for a SEND to take."""
        step.handed[way, index, microbatch] = value

    def _take(self, step: Step, way: str, index: int, microbatch: int) -> Any:
        """What the neighbour stage left: on this rank, or received."""
        received = step.posted.pop((way, index, microbatch), None)
        if received is not None:
            return received()
        return step.handed.pop((way, index, microbatch))
