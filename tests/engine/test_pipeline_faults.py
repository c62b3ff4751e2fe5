"""Faults of pipelines that users of other toolkits met: wrong factors, lost and mixed tensors.

All trials of a layout run in one world.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.topology import Grid
from tests.engine.trials import Trace, Trial, assert_equal_to, by_plain_torch, named

IGNORED = -100
ADAM = partial(torch.optim.AdamW, lr=0.1)


class Scale(nn.Module):
    """Multiplies by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scale() -> nn.Sequential:
    return nn.Sequential(Scale(), nn.Identity())


def layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])


def language() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 10))


def total(output: Tensor, target: Tensor) -> Tensor:
    """The sum of the outputs at valid places: each output is the loss of its item."""
    return torch.where(target != IGNORED, output, 0).sum()


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


def values(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x, target = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return x, target


def tokens(size: int, valid: list[int]) -> tuple[Tensor, Tensor]:
    """Ids and labels [size, 2], of which only those of the samples in ``valid`` count."""
    generator = torch.Generator().manual_seed(size)
    x, target = torch.randint(10, (2, size, 2), generator=generator)
    masked = [k for k in range(size) if k not in valid]
    target[masked] = IGNORED
    return x, target


ONES = torch.ones(8, 1, dtype=torch.float64), torch.zeros(8, 1, dtype=torch.int64)
LONG, SHORT = torch.ones(6, dtype=torch.float64), torch.full((6,), 4.0, dtype=torch.float64)
TWO_LENGTHS = [
    (LONG, torch.zeros(6, dtype=torch.int64)),
    (SHORT, torch.tensor([0, IGNORED, IGNORED, 0, IGNORED, IGNORED])),
]
LENGTHS = [values(2, length, 8) for length in (8, 16, 5)]
MIXED = [values(2, length, 8) for length in (8, 12)]

TWO = {
    "mean gradient 1": Trial(scale, [ONES], total, options={"num_microbatches": 8}),
    "5 of 8 labels": Trial(
        language, [tokens(8, [0, 1, 4, 6, 7])], entropy, options={"num_microbatches": 4}
    ),
    **{
        f"{m} microbatches": Trial(layers, [values(8, 8)] * 2, options={"num_microbatches": m})
        for m in (1, 2, 4, 8)
    },
    "two lengths": Trial(scale, [TWO_LENGTHS], total),
    "one masked": Trial(
        language, [tokens(8, [0, 1, 4, 5, 6, 7])], entropy, options={"num_microbatches": 4}
    ),
    "all masked": Trial(
        language,
        [tokens(8, [3, 5]), tokens(8, []), tokens(8, [1, 7])],
        entropy,
        optimizer=ADAM,
        options={"num_microbatches": 4},
    ),
    "10 of 4": Trial(
        layers, [[values(2 + k % 2, 8) for k in range(10)]], options={"num_microbatches": 4}
    ),
    "sequence lengths": Trial(
        layers, [*LENGTHS, MIXED, LENGTHS[0], MIXED[::-1]], options={"num_microbatches": 2}
    ),
}


@pytest.fixture(scope="module")
def two() -> dict[str, Trace]:
    return named(Grid(pp=2), TWO)


@pytest.mark.report("pytorch/torchtitan#1733")
def test_accumulated_microbatches_give_the_mean_gradient_not_a_decaying_one(
    two: dict[str, Trace],
) -> None:
    before, after = two["mean gradient 1"].weights
    assert (before["0.weight"] - after["0.weight"]).item() == 1.0


@pytest.mark.report("pytorch/torchtitan#2972")
@pytest.mark.report("pytorch/torchtitan#4194")
def test_gradients_and_norm_are_right_where_part_of_the_labels_count(two: dict[str, Trace]) -> None:
    trace = two["5 of 8 labels"]
    assert trace.results[0].num_items == 10
    assert_equal_to(by_plain_torch(TWO["5 of 8 labels"]), trace)


@pytest.mark.report("deepspeedai/DeepSpeed#7773")
def test_norm_and_weights_do_not_depend_on_the_number_of_microbatches(
    two: dict[str, Trace],
) -> None:
    reference = by_plain_torch(TWO["1 microbatches"])
    for m in (1, 2, 4, 8):
        assert_equal_to(reference, two[f"{m} microbatches"])


@pytest.mark.report("pytorch/torchtitan#2206")
@pytest.mark.report("verl-project/verl#5625")
@pytest.mark.report("ml-explore/mlx-lm#1413")
@pytest.mark.report("allenai/open-instruct#1728")
def test_a_short_microbatch_weighs_as_much_as_its_items(two: dict[str, Trace]) -> None:
    trace = two["two lengths"]
    assert trace.results[0].loss == 1.75 and trace.results[0].num_items == 8
    before, after = trace.weights
    assert (before["0.weight"] - after["0.weight"]).item() == 1.75


@pytest.mark.report("ml-explore/mlx-lm#1413")
def test_a_microbatch_without_items_adds_nothing(two: dict[str, Trace]) -> None:
    trial = TWO["one masked"]
    x, target = trial.steps[0]
    kept = torch.tensor([0, 1, 4, 5, 6, 7])
    without = replace(trial, steps=[(x[kept], target[kept])])
    assert_equal_to(by_plain_torch(without), two["one masked"])


@pytest.mark.report("ml-explore/mlx-lm#1413")
def test_a_step_without_items_is_skipped_and_leaves_the_optimizer_as_it_was(
    two: dict[str, Trace],
) -> None:
    trial, trace = TWO["all masked"], two["all masked"]
    skipped = trace.results.pop(1)
    assert skipped.loss == 0 and skipped.skipped and skipped.num_items == 0
    assert skipped.grad_norm == 0
    before, after = trace.weights[1:3]
    assert all(torch.equal(before[name], after[name]) for name in before)
    del trace.weights[2]
    reference = by_plain_torch(replace(trial, steps=[trial.steps[0], trial.steps[2]]))
    assert_equal_to(reference, trace, tolerance=1e-8)


@pytest.mark.report("ml-explore/mlx-lm#1413")
def test_a_list_of_any_number_of_microbatches_is_one_step(two: dict[str, Trace]) -> None:
    trace = two["10 of 4"]
    assert len(trace.results) == 1 and trace.results[0].num_items == 25 * 8
    assert_equal_to(by_plain_torch(TWO["10 of 4"]), trace)


@pytest.mark.report("deepspeedai/DeepSpeed#4777")
@pytest.mark.report("deepspeedai/DeepSpeed#3195")
@pytest.mark.report("deepspeedai/DeepSpeed#5696")
def test_sequences_of_changing_length_are_never_cut(two: dict[str, Trace]) -> None:
    assert_equal_to(by_plain_torch(TWO["sequence lengths"]), two["sequence lengths"])


class Emit(nn.Module):
    """Makes a state, ids and a mask of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        mask = x > 0
        return self.layer(x), mask.sum(1) % 5, mask, None


class Relay(nn.Module):
    """Takes and gives the same four; an error if anything has changed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(8, 8), nn.Embedding(5, 8)

    def forward(self, x: tuple[Tensor, Tensor, Tensor, None]) -> tuple[Any, ...]:
        state, ids, mask, nothing = x
        if (ids.dtype, mask.dtype, nothing) != (torch.int64, torch.bool, None):
            raise TypeError(f"{ids.dtype}, {mask.dtype} and {nothing} arrived")
        if ids.requires_grad or mask.requires_grad or not torch.equal(ids, mask.sum(1) % 5):
            raise ValueError(f"ids {ids} and mask {mask} arrived")
        return self.layer(state) * mask + self.table(ids), ids, mask, nothing


class First(nn.Module):
    def forward(self, x: tuple[Tensor, ...]) -> Tensor:
        return x[0]


def tuples() -> nn.Sequential:
    return nn.Sequential(Emit(), Relay(), nn.Sequential(Relay(), First()))


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.side(x)


class Middle(nn.Module):
    """What a stage does with the second of its inputs: ``through``, ``ignored``, ``sometimes``."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.layer = mode, nn.Linear(8, 8)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        main, side = x
        uses = self.mode == "sometimes" and bool(main.sum() > 0)
        y = self.layer(main + side if uses else main)
        return (y, side) if self.mode == "through" else (y,)


class Join(nn.Module):
    def forward(self, x: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(x).sum(0)


def branches(mode: str) -> nn.Sequential:
    return nn.Sequential(Branch(), Middle(mode), Join())


def through() -> nn.Sequential:
    return branches("through")


def ignored() -> nn.Sequential:
    return branches("ignored")


def sometimes() -> nn.Sequential:
    return branches("sometimes")


THREE = {
    "7 in 3": Trial(layers, [values(7, 8)] * 2, options={"num_microbatches": 3}),
    **{
        builder.__name__: Trial(builder, [[values(k, 8) for k in range(1, 5)]] * 2)
        for builder in (tuples, through, ignored, sometimes)
    },
}
THREE |= {
    f"{name} again": replace(trial, options={**trial.options, "recompute": "full"})
    for name, trial in THREE.items()
}


@pytest.fixture(scope="module")
def three() -> dict[str, Trace]:
    return named(Grid(pp=3), THREE)


@pytest.mark.report("pytorch/pytorch#126600")
def test_microbatches_of_different_sizes_pass_every_stage(three: dict[str, Trace]) -> None:
    assert_equal_to(by_plain_torch(THREE["7 in 3"]), three["7 in 3"])


@pytest.mark.report("deepspeedai/DeepSpeed#969")
@pytest.mark.report("pytorch/pytorch#183582")
@pytest.mark.report("pytorch/PiPPy#941")
def test_tuples_of_floats_ids_masks_and_none_arrive_whole(three: dict[str, Trace]) -> None:
    assert_equal_to(by_plain_torch(THREE["tuples"]), three["tuples"])


@pytest.mark.report("pytorch/pytorch#152827")
@pytest.mark.report("pytorch/torchtitan#2748")
@pytest.mark.parametrize("mode", ["through", "ignored", "sometimes"])
def test_an_input_that_a_stage_does_not_use_gets_zeros(mode: str, three: dict[str, Trace]) -> None:
    reference = by_plain_torch(THREE[mode])
    side = [weights["0.side.weight"] for weights in reference.weights]
    assert torch.equal(side[0], side[1]) == (mode == "ignored")
    assert_equal_to(reference, three[mode])


@pytest.mark.parametrize("name", [name for name in THREE if "again" not in name])
def test_recompute_changes_no_bit_whatever_passes_between_stages(
    name: str, three: dict[str, Trace]
) -> None:
    once, again = three[name], three[f"{name} again"]
    assert once.results == again.results
    for one, other in zip(once.weights, again.weights, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert all(math.isfinite(result.grad_norm) for result in once.results)
