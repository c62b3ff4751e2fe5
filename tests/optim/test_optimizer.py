from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.optim.optimizer import ShardedOptimizer
from parallel3d.optim.schedule import lr_curve
from parallel3d.placement import Replicate
from parallel3d.topology import Axis
from parallel3d.zero.flat import Flat, Held
from tests.engine.cases import Counting

CPU = torch.device("cpu")
SIZES = (100, 7, 200, 64, 3)
GROUPS = (1, 0, 1, 0, 2)
OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.001, "weight_decay": 0.5},
    {"lr": 0.01},
]


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def flats(ranks: int = 1, rank: int = 0, whole: bool = False) -> list[Flat]:
    """Two units' buffers, of one rank."""
    held = [
        Held(str(at), nn.Parameter(value), Replicate(), at, group)
        for at, (value, group) in enumerate(zip(values(0), GROUPS, strict=True))
    ]
    axis = Axis("dp", ranks, rank, tuple(range(ranks)))
    return [
        Flat(part, axis, CPU, dtype=torch.float32, stage=0 if whole else 1)
        for part in (held[:3], held[3:])
    ]


def set_gradients(buffers: list[Flat], gradients: list[Tensor]) -> None:
    for buffer in buffers:
        for held, start, stop in buffer.slots:
            buffer.grad[start:stop] = gradients[int(held.name)]


def collect(worlds: list[list[Flat]]) -> list[Tensor]:
    """The parameters, from what each rank updated."""
    found = [torch.full((size,), torch.nan) for size in SIZES]
    for buffers in worlds:
        for buffer in buffers:
            low = buffer.updated[0]
            for slot in buffer.slots:
                for held, start, stop in buffer.parts(*buffer.updated):
                    if held is slot.held:
                        part = buffer.master[start - low : stop - low]
                        found[int(held.name)][start - slot.start : stop - slot.start] = part
    return found


def reference(make: Any, steps: int) -> list[Tensor]:
    parameters = [nn.Parameter(value) for value in values(0)]
    groups = [
        {**options, "params": [p for p, g in zip(parameters, GROUPS, strict=True) if g == at]}
        for at, options in enumerate(OPTIONS)
    ]
    optimizer = make(groups)
    for step in range(steps):
        for parameter, gradient in zip(parameters, values(step + 1), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, fused=True),
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.5),
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}


@pytest.mark.report("deepspeedai/DeepSpeed#6873")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_interleaved_groups_over_shards_equal_torch_over_parameters(name: str) -> None:
    """Groups keep their options, however many ranks share the buffers."""
    make, expected = OPTIMIZERS[name], reference(OPTIMIZERS[name], 3)
    for ranks in (1, 2, 5):
        worlds = [flats(ranks, rank) for rank in range(ranks)]
        for buffers in worlds:
            optimizer = ShardedOptimizer(make, buffers, OPTIONS)
            for step in range(3):
                set_gradients(buffers, values(step + 1))
                optimizer.step()
        for mine, theirs in zip(collect(worlds), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_cut_gives_the_same_bits(name: str) -> None:
    found = []
    for ranks, whole in ((1, True), (1, False), (2, False), (4, True), (4, False)):
        worlds = [flats(ranks, rank, whole) for rank in range(ranks)]
        for buffers in worlds:
            optimizer = ShardedOptimizer(OPTIMIZERS[name], buffers, OPTIONS)
            for step in range(3):
                set_gradients(buffers, values(step + 1))
                optimizer.step()
        found.append(collect(worlds))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


def test_parts_come_in_group_order_and_padding_between_groups_is_in_one_part() -> None:
    optimizer = ShardedOptimizer(torch.optim.SGD, flats(), OPTIONS)
    parts = [(p.start, p.stop) for p in optimizer.parts()]
    assert parts == [(0, 64), (0, 64), (64, 448), (64, 128)]
    assert optimizer.inner is not None
    assert [group["lr"] for group in optimizer.inner.param_groups] == [0.1, 0.001, 0.01]


def test_a_rank_with_nothing_holds_no_optimizer_and_reports_the_same_lr() -> None:
    empty = ShardedOptimizer(partial(torch.optim.AdamW, lr=0.5), [], [{}], lambda step: 0.5**step)
    assert empty.inner is None and empty.lr == 0.5
    assert empty.states() == empty.blank_states() == []
    empty.step()
    assert empty.lr == 0.25 and empty.updates == 1
    few = ShardedOptimizer(torch.optim.SGD, flats(8, 7), OPTIONS)
    assert few.inner is None and few.lr == 0.1


def test_lr_is_that_of_the_first_group_also_where_a_rank_has_none_of_it() -> None:
    buffers = flats(5, 3)[:1]
    optimizer = ShardedOptimizer(torch.optim.SGD, buffers, OPTIONS)
    (bundle,) = optimizer.bundles.values()
    assert {span.group for span in bundle.spans} == {1}
    assert optimizer.lr == 0.1


@pytest.mark.report("huggingface/nanotron#243")
@pytest.mark.report("huggingface/nanotron#245")
@pytest.mark.report("deepspeedai/DeepSpeed#4344")
@pytest.mark.report("EleutherAI/gpt-neox#1029")
@pytest.mark.parametrize("stop", [0, 3, 5, 11, 19])
def test_learning_rates_used_after_a_restart_are_those_of_an_unbroken_run(stop: int) -> None:
    """Read from the groups at the time of the step: warm-up and cosine, each group by its own."""
    curve = lr_curve("cosine", 20, 5, 0.1)

    def used(optimizer: ShardedOptimizer, steps: int) -> list[list[float]]:
        found: list[list[float]] = []
        for _ in range(steps):
            optimizer.step()
            assert optimizer.inner is not None
            found.append([group["lr"] for group in optimizer.inner.param_groups])
        return found

    unbroken = used(ShardedOptimizer(torch.optim.SGD, flats(), OPTIONS, curve), 20)
    assert [lrs[0] for lrs in unbroken] == [0.1 * curve(step) for step in range(20)]
    first = ShardedOptimizer(torch.optim.SGD, flats(), OPTIONS, curve)
    resumed = ShardedOptimizer(torch.optim.SGD, flats(), OPTIONS, curve)
    before = used(first, stop)
    resumed.restart(first.states(), first.updates, first.counters())
    assert resumed.lr == unbroken[stop][0]
    assert before + used(resumed, 20 - stop) == unbroken


def test_the_schedule_is_asked_once_a_step_and_lr_is_a_python_number() -> None:
    asked = []

    def schedule(step: int) -> Any:
        asked.append(step)
        return torch.tensor(0.5)

    optimizer = ShardedOptimizer(torch.optim.SGD, flats(), OPTIONS, schedule)
    optimizer.step()
    optimizer.step()
    assert asked == [0, 1]
    assert type(optimizer.lr) is float


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_blank_states_have_what_a_step_makes_and_making_them_changes_nothing(name: str) -> None:
    buffers = flats()
    optimizer = ShardedOptimizer(OPTIMIZERS[name], buffers, OPTIONS)
    before = [buffer.data.clone() for buffer in buffers]
    blank = optimizer.blank_states()
    assert all(torch.equal(b.data, old) for b, old in zip(buffers, before, strict=True))
    optimizer.step()
    made = [{key: torch.as_tensor(v).shape for key, v in s.items()} for s in optimizer.states()]
    assert made == [{key: torch.as_tensor(v).shape for key, v in s.items()} for s in blank]


def test_numbers_that_an_optimizer_keeps_in_its_groups_are_kept() -> None:
    def steps(optimizer: ShardedOptimizer, buffers: list[Flat], which: range) -> None:
        for step in which:
            set_gradients(buffers, values(step))
            optimizer.step()

    straight, halves = flats(), flats()
    steps(ShardedOptimizer(Counting, straight, OPTIONS), straight, range(6))
    first = ShardedOptimizer(Counting, halves, OPTIONS)
    steps(first, halves, range(3))
    assert first.counters() == {"0": {"k": 3}, "1": {"k": 3}, "2": {"k": 3}}
    second = ShardedOptimizer(Counting, halves, OPTIONS)
    second.restart(first.states(), 3, first.counters())
    steps(second, halves, range(3, 6))
    for a, b in zip(straight, halves, strict=True):
        assert torch.equal(a.data, b.data)


def test_padding_stays_zero() -> None:
    buffers = flats(2, 1)
    optimizer = ShardedOptimizer(partial(torch.optim.AdamW, weight_decay=0.1), buffers, OPTIONS)
    for step in range(3):
        set_gradients(buffers, values(step + 1))
        optimizer.step()
    for buffer in buffers:
        inside = torch.zeros(len(buffer.data), dtype=torch.bool)
        for _, start, stop in buffer.slots:
            inside[start:stop] = True
        assert buffer.data[~inside].count_nonzero() == 0
