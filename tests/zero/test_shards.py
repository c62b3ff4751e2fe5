from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Engine, Grid, Topology
from parallel3d.comm.collectives import Pending
from parallel3d.placement import Replicate
from parallel3d.topology import Axis
from parallel3d.zero import gradients
from parallel3d.zero.flat import ALIGNMENT, Flat, Held
from parallel3d.zero.shards import Shards
from tests.engine.cases import SGD, batch, engine, share
from tests.world import run_on
from tests.zero.traces import UNITS, positions, traced_steps

ONCE = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 2, "zero_reduce": "last"},
    {"zero": 3, "zero_reduce": "last"},
]
EACH = [{"zero": zero, "zero_reduce": "each"} for zero in (2, 3)]


@pytest.mark.report("facebookresearch/fairscale#517")
@pytest.mark.parametrize("options", ONCE, ids=str)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_reduction_runs_beside_the_backward_of_the_unit_before(
    options: dict[str, Any], microbatches: int
) -> None:
    for trace in run_on(Grid(dp=2), traced_steps, microbatches=microbatches, **options):
        for unit in range(UNITS):
            issued = positions(trace, "reduce_scatter issue", unit)
            waited = positions(trace, "reduce_scatter wait", unit)
            mine = positions(trace, "backward", unit)[microbatches - 1 :: microbatches]
            updates = positions(trace, "update", 0)
            assert len(issued) == len(waited) == len(updates) == 2, "once a step"
            for step in range(2):
                assert mine[step] < issued[step] < waited[step] < updates[step]
                if unit > 0:
                    before = positions(trace, "backward", unit - 1)
                    start = before[microbatches * (step + 1) - 1]
                    assert issued[step] < start < waited[step]


@pytest.mark.parametrize("options", EACH, ids=str)
def test_each_microbatch_is_reduced_beside_the_backward_of_the_unit_before(
    options: dict[str, Any],
) -> None:
    for trace in run_on(Grid(dp=2), traced_steps, microbatches=3, **options):
        for unit in range(UNITS):
            issued, waited = (
                positions(trace, f"reduce_scatter {phase}", unit) for phase in ("issue", "wait")
            )
            mine = positions(trace, "backward", unit)
            before = positions(trace, "backward", unit - 1) or [len(trace)] * 6
            assert len(issued) == len(waited) == len(mine) == 6
            for at in range(6):
                assert mine[at] < issued[at] < waited[at]
                if unit > 0:
                    assert issued[at] < before[at] < waited[at]


@pytest.mark.parametrize("options", ONCE + EACH, ids=str)
def test_no_more_than_two_units_are_reduced_at_once(options: dict[str, Any]) -> None:
    for trace in run_on(Grid(dp=2), traced_steps, microbatches=3, **options):
        under_way = most = 0
        for what, _ in trace:
            under_way += {"reduce_scatter issue": 1, "reduce_scatter wait": -1}.get(what, 0)
            most = max(most, under_way)
        assert most == 2 and under_way == 0


TWO_UNITS = 2 * 128 * 8  # bytes of two units, each padded to 64 elements a parameter


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_unit_is_gathered_beside_the_compute_before_its_own(
    microbatches: int, recompute: str
) -> None:
    options = {"zero": 3, "gather_budget": TWO_UNITS, "recompute": recompute}
    for trace in run_on(Grid(dp=2), traced_steps, microbatches=microbatches, **options):
        computes = [at for at, (what, _) in enumerate(trace) if what in ("forward", "backward")]
        gathers = 0
        for unit in range(UNITS):
            issued, waited = (
                positions(trace, f"all_gather {phase}", unit) for phase in ("issue", "wait")
            )
            assert len(issued) - len(waited) in (0, 1), "one may be for a step to come"
            gathers += len(waited)
            for begin, end in zip(issued, waited, strict=False):
                between = [at for at in computes if begin < at < end]
                ahead = [trace[at][1] for at in between]
                first = unit == 0 and (begin < computes[0] or ("update", 0) in trace[:begin])
                assert first or (ahead and unit not in ahead), (unit, begin, end)
        # Forward 0 1 2 3, backward 3 2 1 0: what turns around is there; two are at each turn.
        assert gathers == 2 * (UNITS + (UNITS - 2) + (microbatches - 1) * 2 * (UNITS - 2))


@pytest.mark.parametrize("options", [*ONCE[1:], *EACH], ids=str)
def test_new_values_are_gathered_ahead_of_the_forward_that_needs_them(
    options: dict[str, Any],
) -> None:
    at = int(options["zero"] == 3)  # which also gathers before the first step
    for trace in run_on(Grid(dp=2), traced_steps, microbatches=1, **options):
        (update, _) = positions(trace, "update", 0)
        for unit in range(UNITS):
            issued, waited = (
                positions(trace, f"all_gather {p}", unit)[at] for p in ("issue", "wait")
            )
            needed = positions(trace, "forward", unit)[1]
            assert update < issued < positions(trace, "forward", 0)[1]
            assert issued < waited < needed
            if unit > 0:
                assert waited > positions(trace, "forward", unit - 1)[1], "waited for too early"


def test_stage_0_gathers_gradients_before_the_update_and_no_parameters() -> None:
    for trace in run_on(Grid(dp=2), traced_steps, zero=0, microbatches=1):
        for unit in range(UNITS):
            waited = positions(trace, "all_gather wait", unit)
            updates = positions(trace, "update", 0)
            assert len(waited) == 2
            assert all(a < b for a, b in zip(waited, updates, strict=True))


def bytes_of_a_step(topology: Topology, **options: Any) -> tuple[int, int, int]:
    """Sent on dp in the second step; elements of the flat buffers, and of their parameters."""
    mine: Engine = engine(topology, optimizer=SGD, **options)
    x, target = share(topology, *batch(0))
    mine.train_step(x, target)
    mine.parts.ledger.reset()
    mine.train_step(x, target)
    flats = mine.parts.shards.trained()
    count = sum(
        parameter.numel() for unit in mine.parts.units for parameter in unit.module.parameters()
    )
    return mine.parts.ledger.bytes()["dp"], sum(len(flat.data) for flat in flats), count


# Microbatches of a step are 2. What fits is gathered once a step; without room a rank of 4 units
# in 2 microbatches has 16 uses, 3 of them of what is there.
LAST, EACH_OF_TWO = {"zero_reduce": "last"}, {"zero_reduce": "each"}


@pytest.mark.parametrize(
    ("layout", "options", "width"),
    [
        ("1x2x1", {"zero": 0, "precision": "fp32"}, (4, 4)),
        ("1x2x1", {"zero": 1, "precision": "fp32"}, (4, 4)),
        ("1x3x1", {"zero": 1, "precision": "bf16"}, (4, 2)),
        ("2x2x1", {"zero": 1, "precision": "fp64"}, (8, 8)),
        ("1x3x1", {"zero": 2, "precision": "bf16", **LAST}, (4, 2)),
        ("2x2x1", {"zero": 2, "precision": "fp32", **EACH_OF_TWO}, (2 * 4, 4)),
        ("1x2x2", {"zero": 3, "precision": "bf16", **LAST}, (4, 2)),
        ("1x3x1", {"zero": 3, "precision": "fp32", **EACH_OF_TWO}, (2 * 4, 4)),
        ("1x2x1", {"zero": 3, "precision": "fp32", **LAST, "gather_budget": 0}, (4, 13)),
        (
            "1x2x1",
            {"zero": 3, "precision": "fp64", **EACH_OF_TWO, "gather_budget": 0},
            (2 * 8, 26),
        ),
    ],
    ids=str,
)
def test_bytes_of_a_step_are_the_lower_bound_of_the_padded_buffers(
    layout: str, options: dict[str, Any], width: tuple[int, int]
) -> None:
    grid = Grid.parse(layout)
    for sent, elements, parameters in run_on(grid, bytes_of_a_step, **options):
        items = 2 * 8 * (grid.dp - 1) // grid.dp
        assert sent == elements * sum(width) * (grid.dp - 1) // grid.dp + items
        # 6 parameters a unit: each is padded to a border, and the buffer to one of each rank.
        units = 4 // grid.pp
        assert 0 <= elements - parameters < units * ALIGNMENT * (6 + grid.dp)


def shards(frozen: Any = None) -> tuple[Shards, nn.Parameter]:
    parameter = nn.Parameter(torch.ones(3))
    axis = Axis.single("dp")
    held = [Held("w", parameter, Replicate(), 0, 0)]
    flat = Flat(held, axis, torch.device("cpu"), dtype=torch.float32, stage=1)
    return Shards({0: [flat]}, frozen=frozen), parameter


def test_gradients_are_set_to_zero_in_place() -> None:
    mine, parameter = shards()
    assert parameter.grad is not None
    kept, _ = parameter.grad, parameter.grad.fill_(2.0)
    mine.after_backward(0, 0, reduce=True)
    mine.abandon()
    assert parameter.grad is kept and kept.count_nonzero() == 0
    mine.after_backward(0, 0, reduce=False)


@pytest.mark.parametrize("unwaited", [True, False])
def test_a_sum_that_a_device_still_writes_is_over_before_gradients_are_zero(
    unwaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that only its wait would write is never waited for: others may not take part."""
    waited: list[Tensor] = []

    def start(x: Tensor, out: Tensor, axis: Axis, **_: Any) -> Pending:
        return Pending(lambda: waited.append(out) or out.fill_(7))  # type: ignore[func-returns-value]

    monkeypatch.setattr(gradients, "start_reduce_scatter", start)
    monkeypatch.setattr(gradients, "writes_unwaited", lambda axis, x: unwaited)
    mine, parameter = shards()
    mine.after_backward(0, 0, reduce=True)
    mine.abandon()
    assert len(waited) == unwaited
    assert parameter.grad is not None and parameter.grad.count_nonzero() == 0


@pytest.mark.report("deepspeedai/DeepSpeed#5439")
def test_a_parameter_that_was_unfrozen_is_found() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    mine, _ = shards({0: [("0.bias", frozen)]})
    mine.after_backward(0, 0, reduce=False)
    frozen.requires_grad_(True)
    with pytest.raises(RuntimeError, match="0.bias was unfrozen after the engine was built"):
        mine.after_backward(0, 0, reduce=False)


def test_a_buffer_that_others_share_may_be_loaded_but_not_changed_by_its_unit() -> None:
    buffer = torch.zeros(2)
    mine = Shards({}, fixed={3: [("3.count", buffer)]})
    mine.after_backward(3, 0, reduce=False)
    buffer.add_(1)
    mine.after_backward(2, 0, reduce=False)
    with pytest.raises(RuntimeError, match="3.count was changed by its unit"):
        mine.after_backward(3, 0, reduce=False)
    mine.publish()
    mine.after_backward(3, 0, reduce=False)
