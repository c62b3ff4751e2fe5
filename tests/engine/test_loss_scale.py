"""fp16: the loss scale under every layout, against plain PyTorch in fp32."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Grid, Topology
from tests.engine.cases import (
    BATCH,
    SGD,
    WIDTH,
    Tensors,
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
from tests.engine.test_precision_faults import Fragile, state_of
from tests.world import run_on

ZEROS = (0, 1, 2, 3)
fp16 = partial(engine, precision="fp16", optimizer=SGD, num_microbatches=4, zero_reduce="last")


def trained(topology: Topology, schedules: list[str], scale: float) -> list[Any]:
    """Initial values, losses, norms and weights of 6 steps, the same in every one of these."""
    found = []
    for schedule in schedules:
        for zero in ZEROS:
            mine = fp16(
                topology,
                schedule=schedule,
                zero=zero,
                max_grad_norm=1.5,
                fp16={"initial_scale": scale},
            )
            initial = mine.state_dict_whole()
            found.append((initial, train(mine, 6), mine.state_dict_whole()))
    for _, losses, weights in found[1:]:
        assert losses == found[0][1] and same(weights, found[0][2])
    return list(found[0])


SCHEDULES = ["gpipe", "1f1b", "zb-h1", "zbv"]


def test_fp16_has_the_same_bits_under_every_schedule_zero_stage_and_scale() -> None:
    """A power of two changes no bit where nothing is too small or too large."""
    whole = run_on(Grid(), trained, schedules=["1f1b"], scale=1024)[0]
    for scale in (1024, 4096):
        cut = run_on(Grid(pp=2), trained, schedules=SCHEDULES, scale=scale)[0]
        assert cut[1] == whole[1] and same(cut[2], whole[2])


@pytest.mark.parametrize("layout", ["1x1x1", "1x2x1", "1x1x2", "2x2x1"])
def test_fp16_follows_fp32_of_plain_pytorch(layout: str) -> None:
    initial, found, weights = run_on(Grid.parse(layout), trained, schedules=["1f1b"], scale=1024)[0]
    model = plain(initial, torch.float32)
    expected = train_plainly(model, 6, SGD, max_norm=1.5, dtype=torch.float32)
    assert torch.tensor(found) == pytest.approx(torch.tensor(expected), rel=2e-3)
    assert error(weights, dict(model.state_dict())) < 0.01


def scaled_gradients(topology: Topology, count: int) -> Tensors:
    """Of each parameter here, in fp16 and divided by the scale, beside those in fp32."""
    found: Tensors = {}
    for precision in ("fp16", "fp32"):
        options = {"fp16": {"scale": 512}} if precision == "fp16" else {}
        mine = engine(topology, precision=precision, num_microbatches=count, **options)
        mine.parts.optimizer.step = lambda: None  # type: ignore[method-assign]
        mine.parts.shards.zero_gradients = lambda: None  # type: ignore[method-assign]
        calls: list[Tensor] = []
        factor = mine._factor
        mine._factor = lambda items, of=factor, calls=calls: (  # type: ignore[method-assign]
            calls.append(of(items)) or calls[-1]
        )
        train(mine, 1)
        assert len(calls) in (0, count) and {call.item() for call in calls} <= {
            mine.loss_scale / 64
        }
        for flat in mine.parts.shards.all():
            for held, start, stop in flat.parts(*flat.owned):
                found[f"{precision} {held.name}"] = flat.grad[start:stop].clone()
    return found


@pytest.mark.report("hpcaitech/ColossalAI#1218")
@pytest.mark.report("pytorch/torchtitan#803")
@pytest.mark.parametrize("count", [4, 8])
def test_each_microbatch_of_a_pipeline_is_scaled_once(count: int) -> None:
    """After the step the gradients are unscaled, once too."""
    for found in run_on(Grid(pp=2), scaled_gradients, count=count):
        names = [name.split()[1] for name in found if name.startswith("fp16")]
        assert names
        for name in names:
            ours, theirs = found[f"fp16 {name}"], found[f"fp32 {name}"]
            assert (ours - theirs).norm() <= 0.01 * theirs.norm()


def kept_otherwise(topology: Topology) -> None:
    """Whatever is computed again, or kept in the host's memory."""
    found = []
    for options in (
        {},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"offload": {"optimizer": "cpu"}},
        {"offload": {"activations": "cpu"}},
    ):
        mine = fp16(topology, max_grad_norm=1.5, fp16={"initial_scale": 1024}, **options)
        found.append((train(mine, 4), mine.state_dict_whole()))
    for losses, weights in found[1:]:
        assert losses == found[0][0] and same(weights, found[0][1])


def test_recompute_and_offload_change_no_bit_of_fp16() -> None:
    run_on(Grid(pp=2, dp=2), kept_otherwise)


def moves(topology: Topology) -> list[tuple[float, float, float]]:
    """The norm, the limit and how far SGD at a rate of 1 went: unclipped, and clipped to half."""
    found = []
    for zero in ZEROS:
        for share_of_norm in (2.0, 0.5):
            for precision in ("fp32", "fp16"):
                options: dict[str, Any] = {"precision": precision, "zero": zero}
                if precision == "fp16":
                    options["fp16"] = {"scale": 1024}
                free = engine(topology, **options)
                ((_, norm),) = train(free, 1)
                mine = engine(
                    topology,
                    optimizer=partial(torch.optim.SGD, lr=1.0),
                    max_grad_norm=share_of_norm * norm,
                    **options,
                )
                before = mine.state_dict_whole()
                train(mine, 1)
                after = mine.state_dict_whole()
                moved = [(after[name] - before[name]).flatten() for name in after]
                total = torch.cat(moved).norm().item() if moved else 0.0
                found.append((norm, share_of_norm * norm, total))
    return found


@pytest.mark.report("NVIDIA/apex#1512")
@pytest.mark.report("deepspeedai/DeepSpeed#3790")
@pytest.mark.parametrize("layout", ["1x1x1", "2x1x1", "1x2x1"])
def test_clipping_compares_the_norm_without_the_scale(layout: str) -> None:
    first, *_ = run_on(Grid.parse(layout), moves)
    for norm, limit, moved in first:
        assert norm == pytest.approx(first[0][0], rel=1e-2)
        assert moved == pytest.approx(min(norm, limit), rel=1e-2)


def one_rank_overflows(topology: Topology) -> Any:
    """Steps 1, 3 and 4 of 6 overflow on the last rank only; hysteresis of 2."""
    found = []
    for zero in ZEROS:
        with torch.device("meta"):
            fragile = Fragile()
        model = nn.Sequential(*blocks(topology, 2), fragile)
        mine = fp16(
            topology,
            model,
            zero=zero,
            optimizer=partial(torch.optim.Adam, lr=0.01),
            lr_schedule=lambda step: min(1.0, (step + 1) / 10),
            fp16={"initial_scale": 1024, "window": 2},
            max_bad_steps=1,
        )
        last = mine.parts.units[-1].module
        scales, lrs = [], []
        for step in range(6):
            bad = step in (1, 3, 4)
            before = state_of(mine)
            if topology.rank == topology.world.size - 1 and isinstance(last, Fragile):
                last.value = math.inf if bad else None
            result = mine.train_step(*share(topology, *batch(step, dtype=torch.float64)))
            same_now = [torch.equal(a, b) for a, b in zip(before, state_of(mine), strict=False)]
            assert result.skipped == bad == all(same_now)
            scales.append(mine.loss_scale)
            lrs.append(result.lr)
        counts = {int(state["step"]) for state in mine.parts.optimizer.states()}
        assert counts <= {3} and mine.parts.optimizer.updates == 3
        found.append((scales, lrs))
    assert found == [found[0]] * len(ZEROS)
    return found[0]


@pytest.mark.report("ecmwf/WeatherGenerator#2724")
@pytest.mark.report("huggingface/accelerate#4242")
@pytest.mark.report("NVIDIA-NeMo/Speech#3293")
@pytest.mark.parametrize("layout", ["1x2x1", "1x1x2", "2x1x1", "2x1x2"])
def test_an_overflow_on_one_rank_lowers_the_scale_on_all(layout: str) -> None:
    """And neither the schedule nor the optimizer counts the step."""
    for scales, lrs in run_on(Grid.parse(layout), one_rank_overflows):
        assert scales == [1024, 1024, 1024, 512, 256, 256]
        assert lrs == pytest.approx([0.001, 0.002, 0.002, 0.003, 0.003, 0.003])


def start_too_high(topology: Topology) -> tuple[list[float], list[bool], int]:
    mine = fp16(
        topology,
        fp16={"initial_scale": 2.0**30, "window": 3, "hysteresis": 1},
        max_bad_steps=2,
    )
    scales, skipped = [], []
    for step in range(20):
        given = share(topology, *batch(step, dtype=torch.float64))
        skipped.append(mine.train_step(*given).skipped)
        scales.append(mine.loss_scale)
    return scales, skipped, mine.parts.optimizer.updates


def test_a_scale_that_is_too_high_falls_until_the_gradients_fit() -> None:
    """However many steps that takes: they do not count against ``max_bad_steps``."""
    ranks = run_on(Grid(pp=2, dp=2), start_too_high)
    scales, skipped, updates = ranks[0]
    assert ranks == [ranks[0]] * 4
    first = skipped.index(False)
    assert first > 4 and updates == skipped.count(False)
    assert scales[first] == 2.0 ** (30 - first)
    assert max(scales[first:]) > scales[first]


def hopeless(topology: Topology) -> list[Any]:
    """The steps made before the end, where a lower scale does not help."""
    found: list[Any] = []
    bad = torch.full((BATCH, WIDTH), math.nan, dtype=torch.float64)
    for value, options in (
        (math.nan, {}),  # the loss itself
        (math.inf, {"initial_scale": 4, "hysteresis": 1}),  # a gradient, at scales 4, 2, 1, 1, 1
        (math.inf, {"scale": 64}),
    ):
        fragile = Fragile()
        mine = fp16(topology, nn.Sequential(fragile), fp16=options, max_bad_steps=3)
        good = share(topology, *batch(0, dtype=torch.float64))
        given = share(topology, bad, bad) if math.isnan(value) else good
        fragile.value = None if math.isnan(value) else value
        with pytest.raises(RuntimeError, match=r"train\.max_bad_steps = 3"):
            for _ in range(20):
                mine.train_step(*given)
        found.append((mine.step, mine.loss_scale))
    return found


def test_steps_that_no_scale_can_mend_end_the_run() -> None:
    with Topology.init() as topology:
        assert hopeless(topology) == [(3, 65536.0), (5, 1.0), (3, 64.0)]


def test_a_loss_that_is_not_finite_moves_neither_the_scale_nor_its_count_of_good_steps() -> None:
    """The forward knows no scale, so a lower one would mend nothing."""
    scales = []
    with Topology.init() as topology:
        mine = fp16(topology, fp16={"initial_scale": 64, "window": 2, "hysteresis": 1})
        for factor in (1.0, math.nan, math.inf, 1.0):
            x, target = batch(0, dtype=torch.float64)
            assert mine.train_step(x, target * factor).skipped == (factor != 1.0)
            scales.append(mine.loss_scale)
    assert scales == [64, 64, 64, 128]


OVERFLOWS = (2, 3, 9)
STEPS = 12


def resumed(topology: Topology, folder: Path, split: int | None, first: bool) -> Any:
    """Losses and scales of steps [0, split) or [split, 12), with overflows at some."""
    mine = fp16(
        topology,
        schedule="zb-h1" if topology.pp.size > 1 else "1f1b",
        zero=1 if topology.dp.size > 1 else 0,
        loss_fn=spoilt,
        fp16={"initial_scale": 1024, "window": 4, "hysteresis": 2},
    )
    if not first:
        mine.load(folder)
    found = []
    for step in range(mine.step, split if first and split else STEPS):
        x, target = batch(step, dtype=torch.float64)
        target[:, 0] = OVERFLOW if step in OVERFLOWS else 0.0
        result = mine.train_step(*share(topology, x, target))
        found.append((result.loss, result.skipped, mine.loss_scale))
    if first and split:
        mine.save(folder)
    return found, mine.state_dict_whole()


OVERFLOW = 77.0


def spoilt(output: Tensor, target: Tensor) -> Tensor:
    """A squared error whose gradient overflows where the target says so; its value does not."""
    loss = nn.functional.mse_loss(output, target, reduction="sum")
    if (target == OVERFLOW).any():
        loss = loss + 1e30 * (output - output.detach()).sum()
    return loss


@pytest.mark.parametrize("split", [3, 6])
@pytest.mark.parametrize(("before", "after"), [("1x2x1", "1x2x1"), ("1x2x1", "2x1x2")])
def test_a_resume_goes_on_with_the_scale_and_its_counters(
    before: str, after: str, split: int, tmp_path: Path
) -> None:
    """The same layout bit for bit, another within tolerance and with the same scales."""
    folder = tmp_path / "checkpoint"
    unbroken, weights = run_on(Grid.parse(before), resumed, folder=folder, split=None, first=True)[
        0
    ]
    assert [scale for *_, scale in unbroken][2:4] == [1024, 512]
    assert {skipped for _, skipped, _ in unbroken} == {False, True}
    run_on(Grid.parse(before), resumed, folder=folder, split=split, first=True)
    found, after_weights = run_on(
        Grid.parse(after), resumed, folder=folder, split=split, first=False
    )[0]
    if before == after:
        assert found == unbroken[split:] and same(after_weights, weights)
    for mine, theirs in zip(found, unbroken[split:], strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-2) and mine[1:] == theirs[1:]


def test_fp16_takes_up_a_checkpoint_of_another_precision(tmp_path: Path) -> None:
    with Topology.init() as topology:
        for precision, other in (("bf16", "fp16"), ("fp16", "bf16")):
            first = engine(topology, precision=precision)
            train(first, 2)
            first.save(tmp_path / precision)
            second = engine(topology, precision=other)
            second.load(tmp_path / precision)
            assert second.loss_scale == (65536 if other == "fp16" else 1)
            assert same(second.state_dict_whole(), first.state_dict_whole())


def test_evaluation_has_no_scale() -> None:
    with Topology.init() as topology:
        low, high = (fp16(topology, fp16={"scale": scale}) for scale in (1.0, 2.0**40))
        x, target = batch(0, dtype=torch.float64)
        assert low.eval_step(x, target)[0] == high.eval_step(x, target)[0] > 0
