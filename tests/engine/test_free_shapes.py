"""What passes between units is free: any pytree, any sizes, skips over stages, changing gradients.

Every layout and schedule gives the same bits, and those are plain PyTorch's but for rounding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.topology import Grid, Topology
from tests.engine.trials import (
    Trace,
    Trial,
    assert_equal_to,
    by_plain_torch,
    engine_of,
    model_of,
    named,
    squared,
)
from tests.world import run_on

WIDTH = 8
SGD = partial(torch.optim.SGD, lr=0.05)
Tree = dict[str, Any]


class Start(nn.Module):
    """From [b, s, 8] to all that the others need; by its values the gate is learned or is not."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.skip, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tree:
        learned = bool(x.sum() > 0)
        return {
            "hidden": self.hidden(x),
            "gate": self.gate(x).sigmoid() if learned else torch.full_like(x, 0.5),
            "skips": (self.skip(x).tanh(), [None]),
            "scale": x.detach().abs().mean(-1, keepdim=True),
            "ids": (x[..., 0] > 0).long(),
            "keep": x > -1,
        }


class Carry(nn.Module):
    """Works on the hidden state and carries the rest; an error if anything has changed its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, tree: Tree) -> Tree:
        check(tree)
        hidden = tree["hidden"] + self.layer(tree["hidden"]).tanh() * tree["keep"]
        return {**tree, "hidden": hidden}


class Fork(Carry):
    """Lets its hidden state skip the units that follow."""

    def forward(self, tree: Tree) -> Tree:
        tree = super().forward(tree)
        return {**tree, "skips": (tree["skips"][0], [tree["hidden"] * 2])}


class Join(Carry):
    """Uses the first skip, which ends here."""

    def forward(self, tree: Tree) -> Tree:
        first, rest = tree["skips"]
        return {**super().forward(tree), "hidden": tree["hidden"] + first, "skips": (None, rest)}


class End(Carry):
    """Uses everything."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH)

    def forward(self, tree: Tree) -> Tensor:
        tree = super().forward(tree)
        (skip,) = tree["skips"][1]
        return tree["hidden"] * tree["gate"] + skip * tree["scale"] + self.table(tree["ids"])


def check(tree: Tree) -> None:
    assert list(tree) == ["hidden", "gate", "skips", "scale", "ids", "keep"]
    assert tree["ids"].dtype == torch.int64 and tree["keep"].dtype == torch.bool
    assert not any(tree[key].requires_grad for key in ("scale", "ids", "keep"))
    if torch.is_grad_enabled():
        assert tree["gate"].requires_grad == bool((tree["gate"] != 0.5).any())


def skips() -> nn.Sequential:
    return nn.Sequential(Start(), Carry(), Fork(), Carry(), Carry(), Join(), Carry(), End())


def batch(rows: int, length: int, learned: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * rows + length)
    x, target = torch.randn(2, rows, length, WIDTH, generator=generator, dtype=torch.float64)
    return x.abs() if learned else -x.abs(), target


SIZES = [(2, 3), (1, 5), (3, 2), (2, 3), (1, 5)]
FLAGS = [(True, False, True, False, True), (False, False, True, True, False), (False,) * 5]
STEPS = [[batch(*size, flag) for size, flag in zip(SIZES, flags, strict=True)] for flags in FLAGS]
SKIPS = Trial(skips, STEPS, optimizer=SGD, options={"partition": "uniform", "schedule": "1f1b"})
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zbv", "v-half", "v-min")


def scheduled(*schedules: str, **options: Any) -> dict[str, Trial]:
    """The trial under each schedule."""
    return {
        " ".join([name, *options.values()]): replace(
            SKIPS, options={**SKIPS.options, "schedule": name, **options}
        )
        for name in schedules
    }


@cache
def skips_in_one_process() -> Trace:
    return named(Grid(), {"": SKIPS})[""]


def assert_same_bits(one: Trace, other: Trace) -> None:
    assert one.results == other.results
    for a, b in zip(one.weights, other.weights, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_in_one_process_pytrees_with_skips_equal_plain_torch() -> None:
    assert_equal_to(by_plain_torch(SKIPS), skips_in_one_process())


@pytest.mark.report("deepspeedai/DeepSpeed#4777")
@pytest.mark.report("pytorch/pytorch#126600")
@pytest.mark.parametrize(
    ("pp", "trials"),
    [
        (2, scheduled("1f1b", "zbv")),
        (3, scheduled(*SCHEDULES) | scheduled("1f1b", "zbv", recompute="full")),
        (4, scheduled("interleaved", "zb-h1", "zbv")),
    ],
    ids=["2", "3", "4"],
)
def test_skips_over_stages_sizes_and_changing_gradients_are_the_same_bits_under_every_schedule(
    pp: int, trials: dict[str, Trial]
) -> None:
    for trace in named(Grid(pp=pp), trials).values():
        assert_same_bits(trace, skips_in_one_process())


# A gradient that is asked for, or is not, chooses the kernel of attention


class Biased(nn.Module):
    """Hands on a bias for attention: a learned one, or one that is not, by the values of x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.slope = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.shape[1], dtype=x.dtype)
        bias = -(places[:, None] - places).abs()
        return self.layer(x), bias * self.slope if bool(x.sum() > 0) else bias


class Attention(nn.Module):
    """[b, s, 8] by 2 heads of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, bias = x
        q, k, v = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.layer(hidden).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return y.transpose(1, 2).flatten(2) + hidden, bias


class First(nn.Module):
    def forward(self, x: tuple[Tensor, ...]) -> Tensor:
        return x[0]


def attention() -> nn.Sequential:
    return nn.Sequential(Biased(), Attention(), Attention(), nn.Sequential(Attention(), First()))


LONG = [(2, 33), (1, 65), (2, 33), (1, 65)]
BIASED = Trial(
    attention,
    [
        [batch(*size, flag) for size, flag in zip(LONG, flags, strict=True)]
        for flags in [(True, False, False, True), (False, True, True, True)]
    ],
    optimizer=SGD,
    options={"partition": "uniform"},
)


def test_the_kernels_of_a_stage_are_those_of_one_process_whatever_needs_a_gradient() -> None:
    (single,) = named(Grid(), {"": BIASED}).values()
    assert_equal_to(by_plain_torch(BIASED), single)
    again = replace(BIASED, options={**BIASED.options, "recompute": "full"})
    for pp in (1, 2):
        for trace in named(Grid(pp=pp), {"once": BIASED, "again": again}).values():
            assert_same_bits(trace, single)


# Training and evaluation in turn


class Turns(NamedTuple):
    """Losses of training and evaluation in turn, and the messages' descriptions that were sent."""

    losses: list[float]
    described: list[int]


EVALUATIONS = [
    [batch(4, 2, True), batch(2, 3, False)],
    [batch(2, 3, True)],
    [batch(4, 2, False), batch(1, 7, True), batch(2, 3, True)],
]


class Described:
    """A channel that counts the descriptions that are sent."""

    def __init__(self, channel: Any) -> None:
        self.channel, self.count = channel, 0

    def send_description(self, description: Any) -> None:
        self.count += 1
        self.channel.send_description(description)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)


def take_turns(topology: Topology, trial: Trial) -> Turns:
    engine = engine_of(topology, trial)
    counters = []
    for border in engine.parts.interpreter.borders.values():
        border.activations = Described(border.activations)
        counters.append(border.activations)
    turns = Turns([], [])
    for step, evaluation in zip(trial.steps, EVALUATIONS, strict=True):
        calls = (engine.eval_step, evaluation), (engine.train_step, step), (engine.eval_step, step)
        for call, batches in calls:
            turns.losses.append(call(batches).loss)
            turns.described.append(sum(counter.count for counter in counters))
    return turns


def plain_turns() -> list[float]:
    model = model_of(SKIPS)
    optimizer = SKIPS.optimizer(model.parameters())
    losses = []

    def mean(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        total = sum(squared(model(x), target) for x, target in pairs)
        return total / sum(target.numel() for _, target in pairs)

    for step, evaluation in zip(STEPS, EVALUATIONS, strict=True):
        losses.append(mean(evaluation).item())
        optimizer.zero_grad()
        loss = mean(step)
        loss.backward()
        optimizer.step()
        losses += [loss.item(), mean(step).item()]
    return losses


@pytest.mark.report("deepspeedai/DeepSpeed#3649")
@pytest.mark.report("deepspeedai/DeepSpeed#3648")
@pytest.mark.parametrize(("schedule", "senders"), [("1f1b", [1, 1, 0]), ("zbv", [1, 2, 1])])
def test_training_and_evaluation_of_other_sizes_in_turn_equal_plain_torch(
    schedule: str, senders: list[int]
) -> None:
    trial = replace(SKIPS, options={**SKIPS.options, "schedule": schedule})
    (single,) = run_on(Grid(), take_turns, trial=trial)
    assert single.losses == pytest.approx(plain_turns(), rel=1e-11)
    ranks = run_on(Grid(pp=3), take_turns, trial=trial)
    # Shapes not seen before: 2 in evaluation, 3 in training, the third in evaluation; then one.
    new = [2, 3, 2, 0, 0, 0, 1, 0, 0]
    for turns, borders in zip(ranks, senders, strict=True):
        assert turns.losses == single.losses
        assert turns.described == [borders * total for total in accumulate(new)]


# Bytes


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def sent(topology: Topology) -> list[int]:
    """Bytes of each tensor sent forth and back, in two steps."""
    engine = engine_of(topology, Trial(layers, [], options={"schedule": "gpipe"}))
    engine.parts.ledger.tracing = True
    for _ in range(2):
        engine.train_step([batch(2, 3, True), batch(1, 5, True)])
    return [event.bytes for event in engine.parts.ledger.trace if event.kind == "send"]


def test_one_tensor_between_stages_costs_its_own_bytes_and_nothing_else() -> None:
    row = WIDTH * 8
    assert run_on(Grid(pp=3), sent) == [
        [6 * row, 5 * row] * 2,
        [6 * row, 5 * row] * 4,
        [6 * row, 5 * row] * 2,
    ]
