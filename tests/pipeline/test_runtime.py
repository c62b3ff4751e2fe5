from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.pipeline.actions import parse, parse_action
from parallel3d.pipeline.criterion import SumLoss
from parallel3d.pipeline.passes import lower
from parallel3d.pipeline.runtime import Interpreter, Step
from parallel3d.pipeline.schedules import build, forwards_over, from_program
from parallel3d.pipeline.stage import Stage, Unit
from tests.pipeline.links import both_ends
from tests.pipeline.units import WIDTH, Apply, Told, linear, made, same

ON_ONE_RANK = "0F0 1F0 0F1 1F1 1B0 0REDUCE0 0B0 1REDUCE1 1B1 0B1"


def total(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def two_stages(modules: list[nn.Module], **hooks: Any) -> dict[int, Stage]:
    units = [Unit(number, f"{number}", module) for number, module in enumerate(modules)]
    return {0: Stage(0, units[:2], **hooks), 1: Stage(1, units[2:], **hooks)}


def criterion(targets: list[Tensor], training: bool = True) -> SumLoss:
    loss = SumLoss(total)
    loss.begin(targets, (lambda: torch.tensor(0.5)) if training else None)
    return loss


def batch(count: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x, target = torch.randn(2, count, 3, WIDTH, generator=generator)
    return list(x), list(target)


def modules() -> list[nn.Module]:
    return made(lambda: [linear(), nn.ReLU(inplace=True), linear()])


def gradients(units: list[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for unit in units for parameter in unit.parameters()]


def plain() -> tuple[float, list[Tensor | None]]:
    units, losses = modules(), []
    for x, target in zip(*batch(), strict=True):
        losses.append(total(nn.Sequential(*units)(x), target))
        (losses[-1] * 0.5).backward()
    return sum(loss.item() for loss in losses), gradients(units)


def test_stages_on_one_rank_hand_over_directly_and_equal_plain_torch() -> None:
    units = modules()
    xs, targets = batch()
    loss = criterion(targets)
    step = Step(xs, [0, 1], [0, 0], True, loss)
    Interpreter(two_stages(units), 2, {}, "here").run(parse(ON_ONE_RANK)[0], step)
    true_loss, true_gradients = plain()
    assert loss.total is not None and loss.total.item() == true_loss
    assert all(map(same, gradients(units), true_gradients))
    assert not step.handed and not step.posted, "something was left over"


def test_stages_on_two_ranks_send_and_receive_and_equal_plain_torch() -> None:
    # Both ranks in one process, in an order in which every message is there when it is needed.
    units = modules()
    stages, ends = two_stages(units), both_ends()
    xs, targets = batch()
    loss = criterion(targets)
    ranks = [Interpreter({r: stages[r]}, 2, {1: ends[r]}, f"rank {r}") for r in range(2)]
    steps = [Step(xs if r == 0 else [None, None], [0, 1], [5, 5], True, loss) for r in range(2)]
    order = (
        "0F0 0SEND_F0 0F1 1RECV_F0 1F0 1B0 0SEND_F1 0RECV_B0 1SEND_B0 0B0"
        " 1RECV_F1 1F1 0RECV_B1 1B1 1SEND_B1 0REDUCE1 0B1"
    )
    for word in order.split():
        action = parse_action(word)
        ranks[action.stage].run([action], steps[action.stage])
    true_loss, true_gradients = plain()
    assert loss.total is not None and loss.total.item() == true_loss
    assert all(map(same, gradients(units), true_gradients))
    assert not any(step.handed or step.posted or step.outputs for step in steps)


def _reduced(told: Told) -> list[str]:
    return [event for event in told.events if event.startswith("reduce")]


def test_reduce_says_of_the_next_backward_of_its_stage_that_it_completes() -> None:
    told = Told()
    xs, targets = batch()
    interpreter = Interpreter(two_stages(modules(), weights=told), 2, {}, "here")
    step = Step(xs, [0, 1], [0, 0], True, criterion(targets))
    interpreter.run(parse("0F0 1F0 0F1 1F1 1B0 1REDUCE1 1B1 0B0")[0], step)
    assert _reduced(told) == ["reduce 2 of 1"], "stage 0 is not at its last"
    interpreter.run(parse("0REDUCE1 0B1")[0], step)
    assert _reduced(told) == [f"reduce {unit} of 1" for unit in (2, 1, 0)]


def test_a_run_ends_when_all_that_it_sent_has_gone() -> None:
    stages, (end, _) = two_stages(modules()), both_ends()
    flushed: list[str] = []
    for name in ("activations", "gradients"):
        getattr(end, name).flush = partial(flushed.append, name)
    step = Step(batch()[0], [0, 1], [0, 0], True, None)
    Interpreter({0: stages[0]}, 2, {1: end}, "rank 0").run(parse("0F0 0SEND_F0")[0], step)
    assert flushed == ["activations", "gradients"]


@pytest.mark.report("huggingface/picotron#5")
@pytest.mark.report("huggingface/picotron#3")
@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_every_unit_is_reduced_once_a_step_under_every_schedule(m: int) -> None:
    for name, pp in (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("gpipe", 4), ("1f1b", 4)):
        for rank, actions in enumerate(lower(build(name, pp, m))):
            reduced = Counter(action.stage for action in actions if action.op == "REDUCE")
            assert reduced == {rank: 1}
            at = next(at for at, action in enumerate(actions) if action.op == "REDUCE")
            later = [action for action in actions[at:] if action.op == "B"]
            assert [action.microbatch for action in later] == [m - 1]


def test_evaluation_runs_forwards_in_evaluation_mode_and_keeps_nothing() -> None:
    units = [*modules()[:2], nn.Sequential(nn.Dropout(0.9), linear())]
    stages = two_stages(units)
    xs, targets = batch(3)
    loss = criterion(targets, training=False)
    schedule = forwards_over(from_program(parse("0F0 1F0 1B0 0B0")), 3)
    step = Step(xs, [0, 1, 2], [0] * 3, False, loss)
    Interpreter(stages, 2, {}, "here").run(schedule.program[0], step)
    assert not any(unit.training for unit in units)
    expected = sum(
        total(nn.Sequential(*units)(x), target).detach().double()
        for x, target in zip(*batch(3), strict=True)
    )
    assert loss.total is not None and torch.equal(loss.total, torch.as_tensor(expected))
    assert all(grad is None for grad in gradients(units))
    assert all(stage.in_flight == 0 for stage in stages.values())
    step = Step(xs, [0, 1], [0, 0], True, criterion(targets))
    Interpreter(stages, 2, {}, "here").run(parse(ON_ONE_RANK)[0], step)
    assert all(unit.training for unit in units), "the next training step is one"


def test_a_mode_that_the_caller_has_changed_is_set_again() -> None:
    units = modules()
    stages = two_stages(units)
    units[2].eval()
    xs, targets = batch()
    step = Step(xs, [0, 1], [0, 0], True, criterion(targets))
    Interpreter(stages, 2, {}, "here").run(parse(ON_ONE_RANK)[0], step)
    assert units[2].training


def test_an_error_names_rank_action_unit_and_stage_and_what_came_before() -> None:
    def fail(x: Tensor) -> Tensor:
        if x.sum() > 0:
            raise KeyError("planted")
        return x

    stages = two_stages([linear(), nn.ReLU(), Apply(fail)])
    xs, targets = batch()
    step = Step([torch.zeros_like(xs[0]), xs[1]], [0, 1], [0, 0], True, criterion(targets))
    for parameter in stages[0].units[0].module.parameters():
        nn.init.ones_(parameter) if parameter.dim() > 1 else nn.init.zeros_(parameter)
    xs[1].fill_(1)
    with pytest.raises(KeyError, match="planted") as error:
        Interpreter(stages, 2, {}, "rank 3 (pp 1)").run(parse(ON_ONE_RANK)[0], step)
    assert error.value.__notes__ == [
        "in unit 2 (Apply), stage 1",
        "rank 3 (pp 1), action 3 of 10: 0F0 1F0 0F1 >>> 1F1",
    ]
    assert all(stage.in_flight == 0 for stage in stages.values()), "nothing is kept after an error"
