"""Faults of tied weights that users of other toolkits met, each as the small case that shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Grid, Topology
from tests.engine.cases import Tensors, batch, engine, share, train_plainly
from tests.engine.tie_cases import batch as token_batch
from tests.engine.tie_cases import build, cross_entropy, engine_of, train, unequal_copies
from tests.world import run_on


def adam_steps(topology: Topology, zero: int) -> Any:
    """Five steps in fp32 of a tie of both ends, and of one that has a middle stage too."""
    found = {}
    for name in ("ends", "three"):
        mine = engine_of(topology, name, "adam", precision="fp32", zero=zero)
        found[name] = train(mine, 5), mine.state_dict_whole()
    return found


@pytest.fixture(scope="module")
def one_stage() -> Any:
    return run_on(Grid(), adam_steps, zero=1)[0]


@pytest.mark.report("uw-syfi/piper#13")
@pytest.mark.report("cornstarch-org/Cornstarch#16")
@pytest.mark.parametrize(("layout", "zero"), [("2x2x1", 0), ("2x2x1", 1), ("4x2x1", 1)])
def test_an_embedding_and_a_head_on_two_stages_follow_one_gradient(
    layout: str, zero: int, one_stage: Any
) -> None:
    found = run_on(Grid.parse(layout), adam_steps, zero=zero)[0]
    for name, (numbers, weights) in one_stage.items():
        torch.testing.assert_close(found[name][0], numbers, rtol=1e-5, atol=0)
        torch.testing.assert_close(found[name][1], weights, rtol=1e-5, atol=1e-6)


def tied_gradient(topology: Topology, **stage: Any) -> tuple[Tensor, Tensors]:
    """What this rank's optimizer is given of the tied parameter, and initial weights."""
    mine = engine_of(topology, "three", max_grad_norm=None, **stage)
    initial, update = mine.state_dict_whole(), mine.parts.optimizer.step
    (tie,) = mine.parts.shards.gradients.ties.ties
    seen: list[Tensor] = []

    def step() -> None:
        seen.append(tie.home.updated_grad.clone())
        update()

    mine.parts.optimizer.step = step  # type: ignore[method-assign]
    train(mine, 1)
    return seen[0], initial


@pytest.mark.report("NVIDIA/Megatron-LM#844")
@pytest.mark.parametrize(
    "sharded",
    [
        {"zero": 1},
        {"zero": 2, "zero_reduce": "last"},
        {"zero": 3, "zero_reduce": "last"},
        {"zero": 2},
        {"zero": 3, "gather_budget": 0},
    ],
    ids=str,
)
def test_every_holder_updates_by_its_shard_of_the_sum_of_all_uses(sharded: dict[str, Any]) -> None:
    shards = run_on(Grid(pp=2, dp=2), tied_gradient, **sharded)
    once = sharded["zero"] == 1 or "zero_reduce" in sharded
    wholes = run_on(Grid(pp=2, dp=2), tied_gradient, zero=0)
    model = build("three", None).double()
    model.load_state_dict(shards[0][1])
    x, target = token_batch(0)
    (cross_entropy(model(x), target) / target.numel()).backward()
    for stage in (0, 2):
        (low, _), (high, _) = shards[stage : stage + 2]
        both = torch.cat([low, high])
        for whole, _ in wholes[stage : stage + 2]:
            assert torch.equal(whole, both) or not once, "as at ZeRO 0"
        torch.testing.assert_close(both[:88], model[0].weight.grad.view(-1), rtol=1e-12, atol=0)
        assert torch.equal(both, torch.cat([part for part, _ in shards[:2]])), "both holders"


def used_twice(topology: Topology) -> Any:
    """Ten steps in fp32 of a linear layer that is the first and the last unit."""
    found = []
    for stage in (0, 1, 2, 3):
        shared, other = twice()
        model = nn.Sequential(shared, nn.Tanh(), other, nn.Tanh(), shared)
        options = {"precision": "fp32", "partition": "uniform", "zero": stage}
        mine, losses = engine(topology, model, **options), []
        for step in range(10):
            losses.append(mine.train_step(*share(topology, *batch(step))).loss)
            assert unequal_copies(mine) == []
        found.append(losses)
    return found, mine.state_dict_whole()


def twice() -> list[nn.Linear]:
    torch.manual_seed(3)
    return [nn.Linear(8, 8), nn.Linear(8, 8)]


@pytest.mark.report("deepspeedai/DeepSpeed#966")
@pytest.mark.parametrize("layout", ["2x1x1", "2x2x1"])
def test_a_layer_that_is_first_and_last_has_one_loss_at_every_stage_of_zero(layout: str) -> None:
    losses, weights = run_on(Grid.parse(layout), used_twice)[0]
    shared, other = twice()
    model = nn.Sequential(shared, nn.Tanh(), other, nn.Tanh(), shared)
    true = train_plainly(model, 10, dtype=torch.float32)
    assert losses[0] == losses[1] and losses[2] == losses[3]
    for found in losses[1:3]:
        assert found == pytest.approx([loss for loss, _ in true], rel=1e-6)
    for key in ("weight", "bias"):
        assert torch.equal(weights[f"0.{key}"], weights[f"4.{key}"])
