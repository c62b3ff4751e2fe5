"""A backward in two actions: what waits for the second, and that together they are the one."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parallel3d import Axis, ColumnParallelLinear, RowParallelLinear
from parallel3d.pipeline.stage import Stage, Unit
from tests.pipeline.units import Told, keeping


class Twice(nn.Module):
    """One weight with two uses in a unit, a norm, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = ColumnParallelLinear(6, 6, axis=Axis.single())
        self.down = RowParallelLinear(6, 6, axis=Axis.single())
        self.norm, self.plain = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.shared(self.shared(self.norm(x)).tanh())) + self.plain(x)


def stage(
    split: bool,
    recompute: bool | str = False,
    prepare: Callable[[nn.Module], nn.Module] = lambda m: m,
) -> Stage:
    torch.manual_seed(0)
    units = [Unit(k, f"{k}", prepare(m)) for k, m in enumerate([Twice(), nn.Linear(6, 6), Twice()])]
    for unit in units:
        for parameter in unit.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    return Stage(0, units, activations=keeping(recompute), split=split)


def gradients(of: Stage) -> list[Tensor]:
    return [p.grad.clone() for unit in of.units for p in unit.module.parameters()]  # type: ignore[union-attr]


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 5, 6, generator=generator).requires_grad_() for _ in range(2)]


def forward(of: Stage, microbatch: int) -> list[Tensor]:
    return [torch.ones_like(of.forward(microbatch, inputs()[microbatch], seed=0))]


@pytest.mark.parametrize("recompute", [False, "full", "selective"])
def test_both_halves_are_the_whole_backward_bit_for_bit(recompute: bool | str) -> None:
    whole, halves = stage(False, recompute), stage(True, recompute)
    expected = [whole.backward(k, forward(whole, k)) for k in (0, 1)]
    found = [halves.input_grad(k, forward(halves, k)) for k in (0, 1)]
    for k in (0, 1):
        halves.weight_grad(k)
    for a, b in zip(found, expected, strict=True):
        assert all(map(torch.equal, a, b))
    assert all(map(torch.equal, gradients(halves), gradients(whole)))


def test_only_the_weights_of_parallel_layers_wait() -> None:
    halves = stage(True)
    halves.input_grad(0, forward(halves, 0))
    for unit in halves.units:
        for name, parameter in unit.module.named_parameters():
            waits = name in ("shared.weight", "down.weight")
            assert parameter.grad is not None
            assert (parameter.grad.abs().sum() == 0) == waits, name
    assert len(halves._deferred[0, 0]) == 3, "two uses of one weight, and one of the other"
    halves.weight_grad(0)
    assert not halves._deferred


def test_a_gradient_is_added_once_a_microbatch() -> None:
    halves, added = stage(True), []
    weight = halves.units[0].module.shared.weight
    halves.input_grad(0, forward(halves, 0))
    version = weight.grad._version
    halves.weight_grad(0)
    added.append(weight.grad._version - version)
    assert added == [1]


def test_units_are_announced_when_their_gradients_are_complete() -> None:
    halves, after = stage(True), []
    halves.weights = Told(after.append)
    halves.input_grad(0, forward(halves, 0))
    assert after == []
    halves.weight_grad(0, reduce=True)
    assert after == [2, 1, 0]


def test_a_whole_backward_is_possible_in_a_stage_that_splits() -> None:
    whole, halves = stage(False), stage(True)
    whole.backward(0, forward(whole, 0))
    halves.backward(0, forward(halves, 0))
    assert all(map(torch.equal, gradients(halves), gradients(whole)))


def test_the_share_of_the_parameters_that_wait_is_told() -> None:
    total = sum(p.numel() for unit in stage(True).units for p in unit.module.parameters())
    assert stage(False).deferred_parameters == (0, total)
    assert stage(True).deferred_parameters == (4 * 36, total)


def test_a_frozen_weight_neither_waits_nor_counts() -> None:
    def freeze(module: nn.Module) -> nn.Module:
        return module.requires_grad_(not isinstance(module, Twice))

    halves = stage(True, prepare=freeze)
    assert halves.deferred_parameters == (0, 36 + 6)
    halves.input_grad(0, forward(halves, 0))
    assert not any(halves._deferred.values())


class Late:
    """What a layer has put off, which can be watched."""

    def __init__(self, make: Callable[[], Tensor], seen: Callable[[], None]) -> None:
        self.make, self.seen = make, seen

    def __call__(self) -> Tensor:
        self.seen()
        return self.make()


def test_what_waited_is_let_go_one_after_another() -> None:
    halves, alive = stage(True), []
    halves.input_grad(0, forward(halves, 0))
    kept: weakref.WeakSet[Late] = weakref.WeakSet()
    queue = halves._deferred[0, 2]
    for at, (parameter, make) in enumerate(queue):
        queue[at] = parameter, Late(make, lambda: alive.append(len(kept)))
        kept.add(queue[at][1])
    del parameter, make
    halves.weight_grad(0)
    assert alive == [3, 2, 1]


# Compiled units


def compiled(module: nn.Module) -> nn.Module:
    module.compile(backend="aot_eager")
    return module


def wrapped(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")


@pytest.fixture
def counters() -> dict[str, dict[str, int]]:
    """What the compiler counts, from nothing."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


# Dynamo looks at the gradient of a tensor that is not a leaf, and hides torch's warning about that,
# but not from a filter that makes errors of warnings.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.report("pytorch/pytorch#161904")
@pytest.mark.parametrize(
    ("prepare", "recompute"), [(compiled, False), (compiled, True), (wrapped, False)]
)
def test_compiled_units_put_off_what_eager_ones_do(
    prepare: Callable[[nn.Module], nn.Module],
    recompute: bool,
    counters: dict[str, dict[str, int]],
) -> None:
    eager, quick = stage(True, recompute), stage(True, recompute, prepare)
    expected = [eager.input_grad(k, forward(eager, k)) for k in (0, 1)]
    found = [quick.input_grad(k, forward(quick, k)) for k in (0, 1)]
    waiting = [{key: len(queue) for key, queue in of._deferred.items()} for of in (eager, quick)]
    assert waiting[0] == waiting[1] and sum(waiting[1].values()) == 2 * 6
    for k in (0, 1):
        eager.weight_grad(k)
        quick.weight_grad(k)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(quick), gradients(eager), rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_units_of_a_stage_that_does_not_split_compile_whole(
    counters: dict[str, dict[str, int]],
) -> None:
    plain, whole = stage(False), stage(False, prepare=compiled)
    plain.backward(0, forward(plain, 0))
    whole.backward(0, forward(whole, 0))
    torch.testing.assert_close(gradients(whole), gradients(plain), rtol=1e-5, atol=1e-6)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
