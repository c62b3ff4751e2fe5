"""Reported faults of precision, and of steps that are not finite."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from parallel3d import Engine, Grid, Topology
from tests.engine.cases import (
    BATCH,
    SGD,
    WIDTH,
    Tensors,
    batch,
    blocks,
    engine,
    error,
    same,
    share,
    train,
    train_plainly,
)
from tests.world import run_on

Losses = list[tuple[float, float]]
BAD = [math.inf, -math.inf, math.nan]


def state_of(mine: Engine) -> list[Tensor]:
    """Copies of masters, optimizer state and parameters of this rank."""
    mine.parts.shards.settle()
    states = [v for s in mine.parts.optimizer.states() for v in s.values() if v is not None]
    flats = [t for flat in mine.parts.shards.trained() for t in (flat.master, flat.data)]
    return [torch.as_tensor(tensor).clone() for tensor in (*states, *flats)]


class Spoilt(Function):
    """The identity, whose gradient gets one element of ``value``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad.view(-1)[-1] = ctx.value
        return grad, None


class Fragile(nn.Module):
    """A linear layer the gradient of whose bias, replicated over tp, is spoilt when asked."""

    value: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.linear.bias
        bias = bias if self.value is None else Spoilt.apply(bias, self.value)
        return nn.functional.linear(x, self.linear.weight, bias)


def one_rank_fails(topology: Topology) -> Any:
    """Steps 1, 3 and 4 of 6 have a bad gradient on the last rank only."""
    results = []
    for zero in (0, 1, 2, 3):
        model = blocks(topology, 2)
        with torch.device("meta"):
            fragile = Fragile()
        mine = engine(
            topology,
            nn.Sequential(*model, fragile),
            zero=zero,
            lr_schedule=lambda step: min(1.0, (step + 1) / 10),
            max_grad_norm=1.0,
        )
        last = mine.parts.units[-1].module
        lrs = []
        for step in range(6):
            bad = {1: 0, 3: 1, 4: 2}.get(step)
            before = state_of(mine)
            if topology.rank == topology.world.size - 1 and isinstance(last, Fragile):
                last.value = None if bad is None else BAD[bad]
            result = mine.train_step(*share(topology, *batch(step, dtype=torch.float64)))
            lrs.append(result.lr)
            assert result.skipped == (bad is not None)
            assert math.isfinite(result.loss) and math.isfinite(result.grad_norm) == (bad is None)
            after = state_of(mine)
            changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=False)]
            assert any(changed) == (bad is None)
            assert mine.bad_steps == {1: 1, 3: 1, 4: 2}.get(step, 0)
        counts = {int(s["step"]) for s in mine.parts.optimizer.states()}
        results.append((lrs, counts, mine.parts.optimizer.updates, mine.step))
    assert results == [results[0]] * 4
    return results[0]


@pytest.mark.report("ecmwf/WeatherGenerator#2724")
@pytest.mark.report("huggingface/accelerate#4242")
@pytest.mark.report("NVIDIA-NeMo/Speech#3293")
@pytest.mark.parametrize("layout", ["1x2x1", "1x1x2", "2x1x1", "2x1x2"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(layout: str) -> None:
    """And no skipped step moves the schedule or the optimizer's own count."""
    for lrs, counts, updates, steps in run_on(Grid.parse(layout), one_rank_fails):
        assert lrs == pytest.approx([0.001, 0.002, 0.002, 0.003, 0.003, 0.003])
        assert counts <= {3} and (updates, steps) == (3, 6)


def raced(topology: Topology, repeats: int) -> list[bool]:
    """One rank's bad gradient arrives early or late."""
    model = nn.Sequential(Fragile())
    mine = engine(topology, model, num_microbatches=1, optimizer=SGD, zero=2)
    module = mine.parts.units[0].module
    assert isinstance(module, Fragile)
    generator = torch.Generator().manual_seed(topology.rank)
    skipped = []
    for step in range(repeats):
        module.value = math.inf if topology.rank == 0 and step % 2 else None
        time.sleep(0.002 * torch.rand((), generator=generator).item())
        skipped.append(mine.train_step(*share(topology, *batch(step))).skipped)
    return skipped


@pytest.mark.report("pytorch/pytorch#115710")
def test_no_rank_misses_what_is_not_finite_however_late_it_comes() -> None:
    assert run_on(Grid(dp=4), raced, repeats=40) == [[False, True] * 20] * 4


def too_many(topology: Topology) -> list[str]:
    mine = engine(topology, max_bad_steps=3)
    texts = []
    nan = torch.full((BATCH, WIDTH), math.nan, dtype=torch.float64)
    good = share(topology, *batch(0, dtype=torch.float64))
    bad = share(topology, nan, nan)
    for given in (bad, bad, good, bad, bad):
        mine.train_step(*given)
    with pytest.raises(RuntimeError) as caught:
        mine.train_step(*bad)
    texts.append(str(caught.value))
    return texts


def test_too_many_bad_steps_in_a_row_end_the_run_on_every_rank() -> None:
    (first,), *others = run_on(Grid(pp=2, dp=2), too_many)
    assert others == [[first]] * 3
    assert "3 steps in a row had a loss (nan) or gradient norm (nan)" in first
    assert "train.max_bad_steps = 3" in first and "data from step 4" in first


def drift(topology: Topology, precision: str) -> Tensors:
    """20 Adam steps; replicated parameters are compared over tp bit by bit."""
    mine = engine(topology, precision=precision, optimizer=partial(torch.optim.Adam, lr=1e-2))
    train(mine, 20)
    mine.parts.shards.settle()
    for unit in mine.parts.units:
        for name, parameter in unit.module.named_parameters():
            if "norm" in name or name == "down.bias":
                copies = [torch.empty_like(parameter) for _ in range(topology.tp.size)]
                if topology.tp.size > 1:
                    group = topology.tp.group
                    torch.distributed.all_gather(copies, parameter.detach(), group=group)
                    assert torch.equal(*copies), f"{name} drifts over tp"
    return mine.state_dict_whole()


@pytest.mark.report("EleutherAI/gpt-neox#1259")
@pytest.mark.report("NVIDIA/TransformerEngine#441")
@pytest.mark.report("NVIDIA/Megatron-LM#1446")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_replicated_parameters_stay_equal_over_tp(precision: str) -> None:
    found = run_on(Grid(tp=2), drift, precision=precision)[0]
    with Topology.init() as topology:
        expected = drift(topology, precision)
    assert error(found, expected) < (1e-5 if precision == "fp32" else 0.1)


@pytest.mark.report("deepspeedai/DeepSpeed#7839")
def test_bf16_gradients_are_those_of_fp32_and_are_cleared() -> None:
    """Nothing scales the loss in bf16."""
    gradients = {}
    for precision in ("fp32", "bf16"):
        with Topology.init() as topology:
            mine = engine(topology, zero=0, precision=precision, optimizer=SGD)
            assert mine.loss_scale == 1
            seen: list[Tensor] = []
            update = mine.parts.optimizer.step

            def step(seen: list[Tensor] = seen, mine: Engine = mine, update: Any = update) -> None:
                seen += [flat.grad.clone() for flat in mine.parts.shards.all()]
                update()

            mine.parts.optimizer.step = step  # type: ignore[method-assign]
            train(mine, 1)
            assert not any(flat.grad.count_nonzero() for flat in mine.parts.shards.all())
            gradients[precision] = torch.cat(seen)
    difference = (gradients["bf16"] - gradients["fp32"]).norm() / gradients["fp32"].norm()
    assert 0 < difference < 0.01
    assert gradients["bf16"].norm() == pytest.approx(gradients["fp32"].norm().item(), rel=0.01)


@pytest.mark.report("deepspeedai/DeepSpeed#3790")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp64"])
def test_clipping_acts_in_every_precision(precision: str) -> None:
    with Topology.init() as topology:
        mine = engine(
            topology,
            loss_fn=lambda y, target: y.square().sum() * 100,
            precision=precision,
            fp16={"initial_scale": 64} if precision == "fp16" else None,
            optimizer=partial(torch.optim.SGD, lr=1.0),
            max_grad_norm=1.0,
        )
        before = mine.state_dict_whole()
        ((_, norm),) = train(mine, 1)
        after = mine.state_dict_whole()
        assert norm > 10
        moved = torch.cat([(after[name] - before[name]).flatten() for name in after])
        assert moved.norm().item() == pytest.approx(1.0, rel=0.01)


class One(nn.Module):
    """A norm-like weight of 1 with a gradient of one per item."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def small_updates(topology: Topology, folder: Path) -> Any:
    """10 Adam steps in bf16, unbroken and resumed after 5."""
    found = []
    for zero in (0, 1, 2, 3):

        def make(zero: int = zero) -> Engine:
            return engine(
                topology,
                nn.Sequential(One()),
                loss_fn=lambda y, target: y.sum(),
                optimizer=partial(torch.optim.Adam, lr=1e-3),
                precision="bf16",
                zero=zero,
            )

        mine, x = make(), torch.ones(2, 3)
        for step in range(10):
            if step == 5:
                mine.save(folder / str(zero))
            mine.train_step(x, x)
        resumed = make()
        resumed.load(folder / str(zero))
        for _ in range(5):
            resumed.train_step(x, x)
        assert same(resumed.state_dict_whole(), mine.state_dict_whole())
        mine.parts.shards.settle()
        bf16 = mine.parts.units[0].module.weight.float().tolist()
        found.append((mine.state_dict_whole(), bf16))
    for masters, weight in found:
        assert same(masters, found[0][0]) and weight == found[0][1]
    return found[0]


@pytest.mark.report("vllm-project/speculators#765")
@pytest.mark.report("NVIDIA/Model-Optimizer#2322")
def test_updates_smaller_than_a_bf16_step_reach_the_weight(tmp_path: Path) -> None:
    for rank, (masters, bf16) in enumerate(run_on(Grid(dp=2), small_updates, folder=tmp_path)):
        assert bf16 == [0.98828125] * 3
        if rank == 0:
            assert masters["0.weight"].tolist() == pytest.approx([0.990] * 3, rel=1e-6)


def reduced(topology: Topology, reduce_dtype: str | None) -> list[float]:
    """The sum over ranks of gradients that a bf16 sum would lose, and bytes sent for it."""
    mine = engine(
        topology,
        nn.Sequential(One()),
        loss_fn=lambda y, target: y.sum(),
        num_items=lambda target: 1 if topology.rank == 0 else 0,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        precision="bf16",
        reduce_dtype=reduce_dtype,
        num_microbatches=1,
    )
    x = torch.full((1, 3), 1.0 if topology.rank == 0 else 2.0**-9)
    mine.parts.ledger.tracing = True
    mine.train_step(x, x)
    trace = mine.parts.ledger.trace
    sent = sum(event.bytes for event in trace if event.kind == "reduce_scatter")
    width = 4 if reduce_dtype in (None, "fp32") else 2
    assert sent == 3 * 64 * width
    weights = mine.state_dict_whole()
    return (1 - weights["0.weight"]).tolist() if topology.rank == 0 else []


@pytest.mark.report("deepspeedai/DeepSpeed#2768")
@pytest.mark.report("pytorch/pytorch#106395")
@pytest.mark.parametrize("reduce_dtype", [None, "fp32", "bf16", "fp16"])
def test_gradients_are_summed_over_ranks_in_fp32(reduce_dtype: str | None) -> None:
    """However narrow they travel: the sum itself is wide."""
    found = run_on(Grid(dp=4), reduced, reduce_dtype=reduce_dtype)[0]
    assert found == pytest.approx([1 + 3 * 2.0**-9] * 3, abs=1e-6)


def of_wires(topology: Topology) -> list[tuple[Losses, Tensors]]:
    """4 steps with gradients that travel in each dtype, the same at every stage."""
    found = []
    for wire in (None, "fp32", "bf16", "fp16"):
        every: list[tuple[Losses, Tensors]] = []
        for zero in (0, 1, 2, 3):
            mine = engine(
                topology, precision="fp32", zero=zero, reduce_dtype=wire, zero_reduce="last"
            )
            every.append((train(mine, 4), mine.state_dict_whole()))
        for losses, weights in every:
            assert losses == every[0][0] and same(weights, every[0][1])
        found.append(every[0])
    return found


@pytest.mark.parametrize("layout", ["1x2x1", "2x2x1"])
def test_a_narrow_wire_changes_gradients_by_its_own_rounding(layout: str) -> None:
    """None and fp32 change nothing of fp32 gradients."""
    own, fp32, bf16, fp16 = run_on(Grid.parse(layout), of_wires)[0]
    assert fp32[0] == own[0] and same(fp32[1], own[1])
    for losses, _ in (bf16, fp16):
        assert losses != own[0]
        assert torch.tensor(losses) == pytest.approx(torch.tensor(own[0]), rel=1e-2)


def test_bf16_follows_fp32_of_plain_pytorch() -> None:
    """Masters and gradients in fp32: only the forward and backward are rounded."""
    with Topology.init() as topology:
        mine = engine(topology, precision="bf16", optimizer=SGD)
        model = blocks(None)
        model.load_state_dict(mine.state_dict_whole())
        expected = train_plainly(model, 20, SGD, dtype=torch.float32)
        found = train(mine, 20)
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=0.02)
