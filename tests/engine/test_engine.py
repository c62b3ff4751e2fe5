from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d import Engine, Grid, Topology
from parallel3d.comm.collectives import all_gather_objects
from parallel3d.engine import StepResult
from tests.engine.cases import (
    ADAMW,
    SGD,
    WIDTH,
    batch,
    blocks,
    engine,
    error,
    plain,
    same,
    share,
    train,
    train_plainly,
)
from tests.world import run_on

LAYOUTS = ["1x1x1", "1x2x1", "2x1x1", "1x1x2", "2x2x1", "2x1x2"]


def train_and_collect(topology: Topology, **options: Any) -> Any:
    mine = engine(topology, **options)
    initial, results = mine.state_dict_whole(), train(mine, 3)
    mine.parts.shards.settle()
    for flat in mine.parts.shards.all():
        copies = all_gather_objects(flat.data, topology.dp)
        assert all(torch.equal(copy, flat.data) for copy in copies), "dp ranks differ"
    return initial, results, mine.state_dict_whole()


@pytest.fixture(scope="module")
def first() -> Any:
    """Of one process: initial weights, (loss, norm) of three steps, weights."""
    with Topology.init() as topology:
        return train_and_collect(topology, max_grad_norm=0.05)


def test_one_process_equals_plain_pytorch(first: Any) -> None:
    initial, results, weights = first
    model = plain(initial)
    expected = train_plainly(model, 3, max_norm=0.05)
    assert np.allclose(results, expected, rtol=1e-12)
    assert all(norm > 0.05 for _, norm in expected), "clipping never acts"
    assert error(weights, model.state_dict()) < 1e-10


@pytest.mark.report("allenai/OLMo-core#319")
@pytest.mark.parametrize(
    ("layout", "zero"), [*((layout, 1) for layout in LAYOUTS[1:]), ("1x2x1", 2), ("2x2x1", 3)]
)
def test_a_layout_starts_from_the_same_bits_and_gives_the_same_numbers(
    layout: str, zero: int, first: Any
) -> None:
    ranks = run_on(Grid.parse(layout), train_and_collect, max_grad_norm=0.05, zero=zero)
    (initial, results, weights), *others = ranks
    assert same(initial, first[0])
    assert np.allclose(results, first[1], rtol=1e-12)
    assert error(weights, first[2]) < 1e-10
    assert all(other == ({}, results, {}) for other in others)


def deltas(topology: Topology) -> Any:
    """Of one SGD step at lr 1, through two linear layers."""
    options = {"optimizer": lambda groups: torch.optim.SGD(groups, lr=1.0)}
    mine = engine(topology, blocks(topology, 2), **options)
    before = mine.state_dict_whole()
    train(mine, 1)
    after = mine.state_dict_whole()
    return {name: after[name] - before[name] for name in after}


@pytest.mark.report("NVIDIA/Megatron-LM#906")
@pytest.mark.report("NVIDIA/Megatron-LM#673")
@pytest.mark.parametrize("layout", ["1x2x1", "1x4x1", "1x2x2", "2x2x1", "1x1x4"])
def test_the_scale_of_a_gradient_does_not_depend_on_the_layout(layout: str) -> None:
    with Topology.init() as topology:
        expected = deltas(topology)
    found = run_on(Grid.parse(layout), deltas)[0]
    assert error(found, expected) < 1e-12


class Counting(TorchDispatchMode):
    """Counts reads of a tensor's value by the host, which wait for the device on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique")
        self.reads += func.overloadpacket.__name__ in waits
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_reads_no_value_but_the_norm_and_loss(
    zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists: list[int] = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        lists.append(tensor.numel())
        return tolist(tensor)

    with Topology.init() as topology:
        # AdamW, unless fused, reads its step counts, which lie on the host.
        mine = engine(topology, optimizer=SGD, max_grad_norm=0.01, zero=zero)
        train(mine, 1)
        monkeypatch.setattr(Tensor, "tolist", counted)
        with Counting() as counting:
            train(mine, 1)
    scalars = [size for size in lists if size != mine.parts.programs.num_microbatches]
    assert scalars == [3]  # norm, loss, items
    assert counting.reads == 0


def test_results_are_python_numbers() -> None:
    with Topology.init() as topology:
        mine = engine(topology, lr_schedule=lambda step: np.float64(0.5))
        x, target = batch(0, dtype=torch.float64)
        for result in (mine.train_step(x, target), mine.eval_step(x, target)):
            assert [type(value) for value in result] == [float, float, float, bool, int]


def test_steps_leave_every_random_state_as_it_was() -> None:
    with Topology.init() as topology:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        mine = engine(topology, model)
        train(mine, 2)
        mine.eval_step(*batch(0, dtype=torch.float64))
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def evaluate_in_between(topology: Topology) -> Any:
    """The same training with and without evaluation before and between; with dropout."""
    found = []
    for evaluates in (False, True):
        with torch.device("meta"):
            model = nn.Sequential(
                *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(2)]
            )
        mine = engine(topology, model, precision="fp32")
        losses = []
        for step in range(3):
            if evaluates:
                evaluated = [mine.eval_step(*share(topology, *batch(9, size))) for size in (8, 3)]
                assert evaluated[0] == mine.eval_step(*share(topology, *batch(9)))
                grads = [flat.grad for flat in mine.parts.shards.all()]
                assert not any(grad.count_nonzero() for grad in grads)
                assert mine.step == step
            losses.append(mine.train_step(*share(topology, *batch(step))))
        found.append((losses, mine.state_dict_whole()))
    (losses, weights), (again, other) = found
    assert losses == again and same(weights, other)


@pytest.mark.report("deepspeedai/DeepSpeed#3649")
@pytest.mark.report("deepspeedai/DeepSpeed#3648")
@pytest.mark.report("facebookresearch/fairscale#586")
@pytest.mark.parametrize("layout", ["1x1x1", "2x2x1"])
def test_evaluation_changes_no_bit_of_training(layout: str) -> None:
    run_on(Grid.parse(layout), evaluate_in_between)


def evaluate_few(topology: Topology) -> list[StepResult]:
    mine = engine(topology)
    return [
        mine.eval_step(*share(topology, *batch(0, size, torch.float64))) for size in (3, 0, 5, 1)
    ]


@pytest.mark.report("Lightning-AI/litgpt#2319")
@pytest.mark.parametrize("layout", ["1x4x1", "2x2x1"])
def test_ranks_without_samples_take_part_in_evaluation(layout: str) -> None:
    with Topology.init() as topology:
        expected = evaluate_few(topology)
    for found in run_on(Grid.parse(layout), evaluate_few):
        assert [r.num_items for r in found] == [3 * WIDTH, 0, 5 * WIDTH, WIDTH]
        losses = [r.loss for r in found]
        assert np.allclose(losses, [r.loss for r in expected], rtol=1e-12, equal_nan=True)
        assert math.isnan(losses[1])


def test_ready_microbatches_of_any_sizes_equal_one_batch() -> None:
    with Topology.init() as topology:
        x, target = batch(0, dtype=torch.float64)
        whole, listed = engine(topology, num_microbatches=1), engine(topology)
        parts = [(x[:5], target[:5]), (x[5:6], target[5:6]), (x[6:], target[6:])]
        a, b = whole.train_step(x, target), listed.train_step(parts)
        assert np.allclose(a[:2], b[:2], rtol=1e-12) and a.num_items == b.num_items
        assert error(listed.state_dict_whole(), whole.state_dict_whole()) < 1e-10


def test_a_batch_without_items_is_skipped_with_loss_zero() -> None:
    with Topology.init() as topology:
        model = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11))
        loss_fn = nn.CrossEntropyLoss(reduction="sum")
        mine = engine(topology, model, loss_fn=loss_fn, lr_schedule=lambda step: 0.5**step)
        before = mine.state_dict_whole()
        x, nothing = torch.arange(4), torch.full((4,), -100)
        result = mine.train_step(x, nothing)
        assert result == StepResult(0.0, 0.0, 0.01, True, 0)
        assert same(mine.state_dict_whole(), before) and mine.bad_steps == 0
        assert mine.train_step(x, x).lr == 0.01 and mine.train_step(x, x).lr == 0.005


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    def fails(output: Tensor, target: Tensor) -> Tensor:
        if target.isnan().any():
            raise RuntimeError("no such target")
        return nn.functional.mse_loss(output, target, reduction="sum")

    with Topology.init() as topology:
        mine, other = engine(topology, loss_fn=fails), engine(topology)
        x, target = batch(0, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="no such target"):
            mine.train_step([(x, target), (x, target * math.nan)])
        assert train(mine, 2) == train(other, 2)
        assert same(mine.state_dict_whole(), other.state_dict_whole())


@pytest.mark.report("deepspeedai/DeepSpeed#7220")
@pytest.mark.report("deepspeedai/DeepSpeed#6767")
def test_the_norm_is_reported_before_clipping_and_the_update_is_clipped() -> None:
    with Topology.init() as topology:
        options = {"optimizer": lambda groups: torch.optim.SGD(groups, lr=1.0)}
        free, clipped = engine(topology, **options), engine(topology, max_grad_norm=0.01, **options)
        before = clipped.state_dict_whole()
        ((_, norm),), ((_, reported),) = train(free, 1), train(clipped, 1)
        assert reported == norm > 0.01
        after = clipped.state_dict_whole()
        moved = torch.cat([(after[name] - before[name]).flatten() for name in after])
        assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


WRONG = {
    "zero.stage = 4 is not one of 0, 1, 2, 3": {"zero": 4},
    "zero.reduce = 'never' is not one of each, last": {"zero_reduce": "never"},
    "zero.reduce_dtype = 'fp64' is not one of fp32, bf16, fp16": {"reduce_dtype": "fp64"},
    "precision = 'fp8' is not one of fp32, bf16, fp16, fp64": {"precision": "fp8"},
    "fp16.scale = 128 is of precision=fp16, but precision = bf16": {
        "precision": "bf16",
        "fp16": {"scale": 128},
    },
    "fp16.windows is not a key; did you mean fp16.window": {
        "precision": "fp16",
        "fp16": {"windows": 5},
    },
    "fp16.window = 5 is of a scale that moves, but fp16.scale = 8 is a fixed one": {
        "precision": "fp16",
        "fp16": {"scale": 8, "window": 5},
    },
    "fp16.window = 0 is below 1": {"precision": "fp16", "fp16": {"window": 0}},
    "fp16.scale = inf is not a finite number": {"precision": "fp16", "fp16": {"scale": math.inf}},
    "fp16.initial_scale = nan is not a finite number": {
        "precision": "fp16",
        "fp16": {"initial_scale": math.nan},
    },
    "recompute.mode = 'some' is not one of none, full, selective": {"recompute": "some"},
    "recompute.every = 0 is below 1": {"recompute": "full", "recompute_every": 0},
    "recompute.every = 2, but recompute.mode = none repeats no unit": {"recompute_every": 2},
    "recompute.mode = full keeps, but that is none: set": {"recompute_partition": True},
    "recompute.mode = full keeps, but that is selective: set": {
        "recompute": "selective",
        "recompute_partition": True,
    },
    "recompute.partition = true cuts over tp, but topology.tp = 1": {
        "recompute": "full",
        "recompute_partition": True,
    },
    "recompute.mode = selective .* a compiled unit hides": {
        "recompute": "selective",
        "compile": True,
    },
    "max_grad_norm = 0 must be above 0": {"max_grad_norm": 0},
    "offload = 'cpu' is not a mapping": {"offload": "cpu"},
    "offload.optimiser is not a key; did you mean offload.optimizer": {
        "offload": {"optimiser": "cpu"}
    },
    "offload.optimizer = disk, but offload.path is null": {"offload": {"optimizer": "disk"}},
    "offload.path = /x, but nothing goes to disk": {"offload": {"path": "/x"}},
    "optim.state_dtype = 'fp8' is not one of null, bf16": {"state_dtype": "fp8"},
    "SGD with these options keeps no moments that optim.state_dtype = bf16": {
        "optimizer": torch.optim.SGD,
        "state_dtype": "bf16",
    },
    r"AdamW with betas = \(0.9, 0.999\) and optim.state_dtype = bf16": {"state_dtype": "bf16"},
    "offload.parameters = disk is not built yet": {"offload": {"parameters": "disk"}},
    "zero.gather_budget = -1 is a number of bytes, 0 or more": {"gather_budget": -1},
    "zero.shard_size = 2 does not divide topology.dp = 1: set zero.shard_size=1": {"shard_size": 2},
    "LBFGS cannot update flat pieces": {"optimizer": torch.optim.LBFGS},
}


@pytest.mark.report("EleutherAI/gpt-neox#199")
@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_done_is_refused_by_name(message: str) -> None:
    with Topology.init() as topology, pytest.raises(ValueError, match=message):
        engine(topology, **WRONG[message])


def test_a_batch_smaller_than_its_microbatches_is_refused() -> None:
    with Topology.init() as topology:
        mine = engine(topology, num_microbatches=9)
        with pytest.raises(ValueError, match="local batch of 8 cannot be cut .* = 9"):
            train(mine, 1)


def test_names_of_the_engine_are_not_taken_as_meta() -> None:
    with Topology.init() as topology, pytest.raises(ValueError, match="meta step is the engine's"):
        engine(topology).save("nowhere", step=3)


def different_batches(topology: Topology) -> str:
    """Ranks of one dp index get different data, on the first step after a resume too."""
    mine = engine(topology)
    mine.step = 7
    x, target = batch(topology.rank, dtype=torch.float64)
    with pytest.raises(ValueError) as caught:
        mine.train_step(x, target)
    return str(caught.value)


def test_ranks_that_must_have_the_same_batch_are_checked_on_the_first_step() -> None:
    texts = run_on(Grid(tp=2), different_batches)
    assert all("ranks of dp index 0 were given different x" in text for text in texts)


def share_of_memory(topology: Topology, zero: int) -> tuple[int, int]:
    mine: Engine = engine(topology, optimizer=ADAMW, zero=zero)
    train(mine, 1)
    states = mine.parts.optimizer.states()
    whole = sum(len(flat.data) for flat in mine.parts.shards.trained())
    return sum(v.numel() for s in states for v in s.values() if v.dim()), whole


@pytest.mark.report("EleutherAI/gpt-neox#199")
@pytest.mark.report("deepspeedai/DeepSpeed#3441")
@pytest.mark.parametrize("layout", ["1x2x1", "2x2x1", "1x2x2"])
def test_zero_1_holds_half_the_moments_on_each_of_two_ranks(layout: str) -> None:
    for elements, whole in run_on(Grid.parse(layout), share_of_memory, zero=1):
        assert elements == 2 * whole / 2


def in_place(topology: Topology) -> bool:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4))
    engine = Engine(
        model,
        topology,
        loss_fn=nn.MSELoss(reduction="sum"),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        num_microbatches=2,
        schedule="gpipe",
    )
    x = torch.randn(4, 4)
    before = x.clone()
    engine.train_step(x, x.sin())
    return torch.equal(x, before)


def test_a_first_unit_may_work_in_place_and_the_batch_stays_as_it_was() -> None:
    assert run_on(Grid(pp=2), in_place) == [True, True]
