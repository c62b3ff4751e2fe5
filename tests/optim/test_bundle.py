"""One unit at a time, and state kept in fewer bits: what is kept, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.optim.narrow import LARGEST_BETA, check_narrow
from parallel3d.optim.optimizer import Apart, ShardedOptimizer
from parallel3d.zero.flat import Flat
from tests.optim.test_optimizer import OPTIMIZERS, OPTIONS, collect, flats, set_gradients, values

CPU = torch.device("cpu")
BETAS = (0.9, 0.95)
ADAMW = partial(torch.optim.AdamW, betas=BETAS, fused=True)


def stepped(make: Any, apart: bool, **options: Any) -> tuple[list[Tensor], ShardedOptimizer]:
    buffers = flats()
    units = {3: buffers[:1], 7: buffers[1:]}
    optimizer = ShardedOptimizer(
        make, buffers, OPTIONS, lambda step: 0.5**step, Apart(units, **options) if apart else None
    )
    for step in range(3):
        set_gradients(buffers, values(step + 1))
        optimizer.step()
    return collect([buffers]), optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_units_updated_apart_have_the_bits_of_one_call(name: str) -> None:
    (one, _), (apart, optimizer) = (stepped(OPTIMIZERS[name], each) for each in (False, True))
    assert list(optimizer.bundles) == [3, 7] and optimizer.updates == 3
    assert all(torch.equal(a, b) for a, b in zip(apart, one, strict=True))


def by_hand() -> list[Tensor]:
    """AdamW whose moments are rounded to bf16 after each step, and nothing else."""
    groups = (1, 0, 1, 0, 2)
    parameters = [nn.Parameter(value) for value in values(0)]
    optimizers = [
        ADAMW([{**OPTIONS[group], "params": [parameter]}])
        for parameter, group in zip(parameters, groups, strict=True)
    ]
    for step in range(3):
        gradients = values(step + 1)
        for parameter, gradient, each in zip(parameters, gradients, optimizers, strict=True):
            parameter.grad = gradient
            each.param_groups[0]["lr"] = OPTIONS[groups[optimizers.index(each)]]["lr"] * 0.5**step
            each.step()
            for name in ("exp_avg", "exp_avg_sq"):
                state = each.state[parameter]
                state[name] = state[name].bfloat16().float()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.report("deepspeedai/DeepSpeed#7839")
def test_moments_in_bf16_are_rounded_once_a_step_and_widened_for_it() -> None:
    found, optimizer = stepped(ADAMW, True, dtype=torch.bfloat16)
    torch.testing.assert_close(found, by_hand(), rtol=1e-6, atol=1e-7)
    for state in optimizer.states():
        assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
        assert state["step"] == 3 and state["step"].dtype == torch.float32
    assert all(not bundle.inner.state for bundle in optimizer.bundles.values())


def test_the_bytes_of_narrow_state_are_predicted() -> None:
    _, optimizer = stepped(ADAMW, True, dtype=torch.bfloat16)
    held = sum(state[n].nbytes for state in optimizer.states() for n in ("exp_avg", "exp_avg_sq"))
    fresh = ShardedOptimizer(
        ADAMW, [], OPTIONS, apart=Apart({0: flats()[:1], 1: flats()[1:]}, torch.bfloat16)
    )
    assert fresh.predicted_bytes() == held


def test_a_beta_that_stands_still_in_bf16_is_refused_and_the_next_smaller_moves() -> None:
    check_narrow(partial(torch.optim.AdamW, betas=(0.9, LARGEST_BETA)), [{}], CPU)
    message = r"AdamW with betas = \(0.9, 0.999\) .* stands still in bf16, .*state_dtype=null"
    with pytest.raises(ValueError, match=message):
        check_narrow(torch.optim.AdamW, [{}], CPU)
    with pytest.raises(ValueError, match="stands still"):
        check_narrow(torch.optim.AdamW, [{"betas": BETAS}, {"betas": (0.9, 0.998)}], CPU)
    for make, key in (
        (partial(torch.optim.RMSprop, alpha=0.999), "alpha = 0.999"),
        (partial(torch.optim.Adadelta, rho=0.999), "rho = 0.999"),
        (partial(torch.optim.SGD, momentum=0.999), "momentum = 0.999"),
        (torch.optim.Adagrad, "adds up"),
    ):
        with pytest.raises(ValueError, match=rf"{key} .*stands still in bf16"):
            check_narrow(make, [{}], CPU)
    numbers = torch.linspace(1, 2, 129)[:-1].bfloat16()
    falls = (numbers.float() * LARGEST_BETA).bfloat16() < numbers
    assert falls.all(), "a number that a factor of this size leaves where it is"
    assert not ((numbers.float() * 0.998).bfloat16() < numbers).all()


def test_state_that_is_not_elementwise_is_not_narrowed() -> None:
    class Rows(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["rows"] = torch.zeros(8)
            super().step(closure)

    with pytest.raises(ValueError, match=r"Rows keeps rows \[8\] of a parameter \[64\]"):
        check_narrow(Rows, [{}], CPU)
    check_narrow(partial(torch.optim.SGD, momentum=0.9), [{}], CPU)


def test_a_bundle_of_a_flat_that_is_whole_or_a_shard_is_one() -> None:
    buffers: list[Flat] = flats(5, 3)
    optimizer = ShardedOptimizer(ADAMW, buffers, OPTIONS, apart=Apart({0: buffers[:1], 1: []}))
    assert list(optimizer.bundles) == [0]
