"""What units keep on the host: the bits, the bytes, and what stays."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d import Axis, ColumnParallelLinear
from parallel3d.comm.host import host_axis
from parallel3d.comm.ledger import Ledger
from parallel3d.pipeline.activations import Activations
from parallel3d.pipeline.offload import Host
from tests.live import Live
from tests.pipeline.unit_cases import CASES, REPEATABLE, in_place_through_a_view
from tests.pipeline.units import (
    WIDTH,
    Apply,
    Told,
    agree,
    by_stage,
    gradients_for,
    hidden,
    linear,
    made,
    stage_of,
)

ROWS = 64
HIDDEN = ROWS * WIDTH * 4  # bytes of one activation
MODES = ["none", "full", "selective"]


def host(least: int = 1) -> Host:
    made = Host(torch.device("cpu"), host_axis(0))
    made.least = least
    return made


def heard(of: Host) -> Ledger:
    ledger = Ledger()
    ledger.tracing = True
    ledger.attach(of.axis)
    return ledger


def activation() -> Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


ALL = [(case, mode) for mode in MODES for case in (CASES if mode == "none" else REPEATABLE)]


@pytest.mark.parametrize("needs_grad", [True, False], ids=["inner", "first"])
@pytest.mark.parametrize(("case", "mode"), ALL)
def test_offload_changes_no_bit(case: str, mode: str, needs_grad: bool) -> None:
    away = by_stage(made(CASES[case]), hidden(needs_grad), recompute=Activations(mode, host=host()))
    assert agree(away, by_stage(made(CASES[case]), hidden(needs_grad)))


LAYERS: dict[str, tuple[Any, int, int, int]] = {
    # What each of two units lets go in each mode: of the graph, its input, and products besides.
    "layers": (lambda: nn.Sequential(linear(), nn.GELU(), linear()), 3, 1, 2),
    "parallel layers": (
        lambda: nn.Sequential(
            ColumnParallelLinear(WIDTH, WIDTH, axis=Axis.single()),
            nn.GELU(),
            ColumnParallelLinear(WIDTH, WIDTH, axis=Axis.single()),
        ),
        3,
        1,
        2,
    ),
    "many operations": (lambda: Apply(lambda x: x.exp().sin().exp().sin()), 2, 1, 0),
    "one input twice": (lambda: Apply(lambda x: x * x.view(WIDTH, ROWS).t()), 1, 1, 0),
    "views of one memory": (
        lambda: Apply(lambda x: torch.mul(*(x * 2).view(2, ROWS // 2, WIDTH)).repeat(2, 1)),
        1,
        1,
        0,
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unit", LAYERS)
def test_each_storage_goes_once_and_comes_back_once(unit: str, mode: str) -> None:
    make, graph, given, products = LAYERS[unit]
    count = {"none": graph, "full": given, "selective": given + products}[mode]
    store = host()
    ledger = heard(store)
    stage = stage_of([make(), make()], Activations(mode, host=store), split=True)
    for parameter in (p for each in stage.units for p in each.module.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    with Live() as live:
        for k in range(3):
            output = stage.forward(k, activation(), seed=0)
            gradient = torch.ones_like(output)
            del output
            away = [buffer.nbytes for buffer in store.buffers]
            assert sum(away) == ledger.bytes()["host"] == 2 * count * HIDDEN * (k + 1)
            left = live.bytes([*store.buffers, gradient])
            stand_ins = 2 * 4 * (k + 1) if mode == "none" else 0
            assert left == stand_ins, "nothing but an element for each unit's input"
        for k in range(3):
            del stage.input_grad(k, [torch.ones(ROWS, WIDTH)])[:]
            stage.weight_grad(k)
        del gradient
        assert live.bytes() == 0 and not store.buffers
    ways = [event.tag for event in ledger.trace]
    assert ways.count("out") == ways.count("back") == 2 * count * 3
    assert {event.kind for event in ledger.trace} == {"offload"}


def test_what_is_small_or_no_number_or_a_parameter_stays() -> None:
    class Stays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))
            self.register_buffer("table", torch.randn(ROWS, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            few = x.sum(0)
            ids = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % ROWS
            picked = x.gather(0, ids)
            return picked.exp() * self.weight.t().t() * self.table * few.exp()

    store = host(least=HIDDEN)
    ledger = heard(store)
    stage = stage_of([Stays()], Activations(host=store))
    output = stage.forward(0, activation(), seed=0)
    # exp's result, and its products with the weight and the table.
    assert ledger.bytes()["host"] == 3 * HIDDEN
    stage.backward(0, gradients_for(output))
    assert ledger.bytes()["host"] == 2 * 3 * HIDDEN


def test_a_part_of_the_callers_batch_stays() -> None:
    store = host()
    ledger = heard(store)
    stage = stage_of([Apply(torch.sin)], Activations(host=store))
    part = torch.randn(2 * ROWS, WIDTH)[:ROWS].requires_grad_()
    stage.backward(0, gradients_for(stage.forward(0, part, seed=0)))
    assert not ledger.bytes()


def test_less_than_a_mebibyte_stays_unless_it_is_asked_for() -> None:
    store = Host(torch.device("cpu"), host_axis(0))
    ledger = heard(store)
    stage = stage_of([Apply(torch.sin), Apply(torch.sin)], Activations(host=store))
    stage.forward(0, activation(), seed=0)
    assert not ledger.bytes()
    stage.forward(1, torch.randn(2**18, requires_grad=True), seed=0)
    assert ledger.bytes()["host"] == 2 * 2**20


def test_an_evaluation_copies_nothing() -> None:
    store = host()
    ledger = heard(store)
    stage_of([linear()], Activations(host=store)).evaluate(activation(), seed=0)
    assert not ledger.bytes() and not store.buffers


def test_a_unit_comes_back_while_the_one_after_it_works() -> None:
    store = host()
    ledger = heard(store)
    ledger.reset()
    stage = stage_of(
        [Apply(torch.sin), Apply(torch.sin), Apply(torch.sin)],
        Activations(host=store),
        weights=Told(lambda unit: done.append((unit, [e.tag for e in ledger.trace].count("back")))),
    )
    done: list[tuple[int, int]] = []
    stage.backward(0, gradients_for(stage.forward(0, activation(), seed=0)))
    assert done == [(2, 2), (1, 3), (0, 3)]


def test_a_number_and_its_conjugate_lie_in_one_memory() -> None:
    def unit(x: Tensor) -> Tensor:
        z = torch.complex(x, x.sin())
        return (z * z.conj() * z.exp()).imag

    away = by_stage([Apply(unit)], hidden(), recompute=Activations(host=host()))
    assert agree(away, by_stage([Apply(unit)], hidden()))


@pytest.mark.parametrize("least", [1, 2**40], ids=["all away", "all here"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_of_a_microbatch_that_is_given_up(mode: str, least: int) -> None:
    store = host(least)
    stage = stage_of([linear(), Apply(lambda x: x.exp().sin()), linear()])
    stage.activations = Activations(mode, host=store)
    with Live() as live:
        stage.forward(0, activation(), seed=0)
        stage.clear()
        assert live.bytes() == 0 and not store.buffers


@pytest.mark.parametrize("least", [1, 2**40], ids=["all away", "all here"])
def test_what_a_graph_no_longer_needs_is_let_go_within_a_unit(least: int) -> None:
    at: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            at.append(live.bytes([*store.buffers]))
            return grad * 1

    store = host(least)
    unit = Apply(lambda x: F.gelu(Look.apply(F.gelu(Look.apply(F.gelu(x))))))
    with Live() as live:
        stage = stage_of([unit], Activations(host=store))
        given = [torch.ones_like(stage.forward(0, activation(), seed=0))]
        stage.backward(0, given)
    later, sooner = at
    assert later == sooner + HIDDEN


def wasteful(x: Tensor) -> Tensor:
    """Makes graphs of which nothing comes."""
    x.exp().exp()
    return x.sin()


def test_what_died_with_its_graph_is_neither_copied_nor_kept() -> None:
    store = host()
    ledger = heard(store)
    stage = stage_of([Apply(wasteful)], Activations(host=store))
    stage.backward(0, gradients_for(stage.forward(0, activation(), seed=0)))
    assert [event.tag for event in ledger.trace] == ["out", "back"], "the input of sin"


def test_what_died_with_its_graph_does_not_stay_either() -> None:
    stage = stage_of([Apply(wasteful)], Activations(host=host(least=2**40)))
    x = activation()
    with Live() as live:
        stage.forward(0, x, seed=0)
        (left,) = stage.kept(0)
        assert left.data_ptr() == x.data_ptr()
        assert live.bytes() == 4, "the stand-in of the input"


WRITTEN = {
    "the result": lambda x: x.exp().add_(1),
    "through a view": lambda x: in_place_through_a_view(x.exp()),
    "the operand": lambda x: x.sin() + x.add_(1),
}


@pytest.mark.parametrize("least", [1, 2**40], ids=["all away", "all here"])
@pytest.mark.parametrize("unit", WRITTEN.values(), ids=WRITTEN)
def test_a_saved_tensor_that_its_unit_writes_to_is_refused_by_name(unit: Any, least: int) -> None:
    stage = stage_of([linear(), Apply(unit)], Activations(host=host(least)))
    output = stage.forward(0, activation(), seed=0)
    with pytest.raises(RuntimeError, match=r"a tensor \[64, 8\] that unit 1 needs .* in place"):
        stage.backward(0, gradients_for(output))


def test_a_saved_tensor_that_the_next_unit_writes_to_is_refused_if_it_stayed() -> None:
    units = lambda: [Apply(torch.exp), Apply(lambda x: x.add_(1))]  # noqa: E731
    expected = by_stage([Apply(torch.exp), Apply(lambda x: x + 1)], hidden())
    assert agree(by_stage(units(), hidden(), recompute=Activations(host=host())), expected)
    with pytest.raises(RuntimeError, match="that unit 0 needs for its backward was changed"):
        by_stage(units(), hidden(), recompute=Activations(host=host(least=2**40)))


@pytest.mark.parametrize("least", [1, 2**40], ids=["all away", "all here"])
def test_what_only_a_dead_graph_had_saved_may_be_written_to(least: int) -> None:
    def unit(x: Tensor) -> Tensor:
        y = x * 2
        y.sin()
        return y.add_(1).cos()

    away = by_stage([Apply(unit)], hidden(), recompute=Activations(host=host(least)))
    assert agree(away, by_stage([Apply(unit)], hidden()))


@pytest.mark.parametrize("mode", MODES)
def test_only_what_a_unit_hands_on_is_waited_for(mode: str, monkeypatch: Any) -> None:
    """Others may write into that; a wait for the rest would hold up the forward."""
    waits: list[Any] = []
    monkeypatch.setattr(Host, "wait", lambda self, event: waits.append(event))
    inside = nn.Sequential(linear(), nn.GELU(), linear(), nn.GELU())
    for unit, least in ((inside, 0), (nn.Identity(), 1)):
        stage = stage_of([unit], Activations(mode, host=host()))
        waits.clear()
        stage.forward(0, activation(), seed=0)
        assert len(waits) == (0 if mode == "none" else least)


def test_each_stream_that_copies_is_told_to_the_allocator(monkeypatch: Any) -> None:
    """Memory that is dropped before a copy ends must not be given to others meanwhile."""

    class Stream:
        def wait_event(self, event: Any) -> None: ...
        def wait_stream(self, stream: Any) -> None: ...
        def record_event(self) -> None: ...

    told: list[tuple[int, Any]] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(Tensor, "record_stream", lambda t, s: told.append((t.data_ptr(), s)))
    store = host()
    store._out, store._back = out, back = Stream(), Stream()
    source = torch.randn(ROWS)
    target, _ = store.copy_back(*store.copy_out(source))
    assert told == [(source.data_ptr(), out), (target.data_ptr(), back)]
    assert torch.equal(source, target)
