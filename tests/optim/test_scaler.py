"""The loss scale: when it falls, when it rises, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel3d.optim.scaler import LARGEST, LossScaler


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is an overflow."""
    found = []
    for step in overflows:
        scaler.update(step == "x")
        found.append(scaler.scale)
    return found


def test_the_scale_halves_once_hysteresis_is_used_up_and_then_with_every_overflow() -> None:
    scaler = LossScaler(initial_scale=64, window=100, hysteresis=3)
    assert scales(scaler, "x.x.xx") == [64, 64, 64, 64, 32, 16]


def test_a_window_of_good_steps_doubles_the_scale_and_restores_the_hysteresis() -> None:
    scaler = LossScaler(initial_scale=64, window=3, hysteresis=2)
    assert scales(scaler, "..x...xx") == [64, 64, 64, 64, 64, 128, 128, 64]


def test_an_overflow_begins_the_window_anew() -> None:
    scaler = LossScaler(initial_scale=4, window=2, hysteresis=1)
    assert scales(scaler, ".x.x..") == [4, 2, 2, 1, 1, 2]


def test_the_scale_stays_between_its_least_and_what_fp32_holds() -> None:
    low = LossScaler(initial_scale=8, min_scale=3, hysteresis=1)
    assert scales(low, "xxx") == [4, 3, 3] and not low.can_fall
    high = LossScaler(initial_scale=LARGEST / 2, window=1)
    assert scales(high, "...") == [LARGEST] * 3
    assert torch.tensor(LARGEST, dtype=torch.float32).isfinite()


def test_a_fixed_scale_never_moves() -> None:
    scaler = LossScaler(scale=128, window=1, hysteresis=1)
    assert scales(scaler, "xx..x") == [128] * 5 and not scaler.can_fall


def test_the_same_as_torch_grad_scaler_where_that_has_the_same_rule() -> None:
    """Without hysteresis."""
    pattern = "...x..xx....x......"
    mine = LossScaler(initial_scale=1024, window=3, hysteresis=1, min_scale=2**-20)
    scale, tracker = torch.tensor([1024.0]), torch.zeros(1, dtype=torch.int32)
    for found, step in zip(scales(mine, pattern), pattern, strict=True):
        torch._amp_update_scale_(scale, tracker, torch.tensor([float(step == "x")]), 2.0, 0.5, 3)
        assert found == scale.item()


@pytest.mark.parametrize("split", range(8))
def test_a_scaler_goes_on_from_its_state(split: int) -> None:
    options: dict[str, Any] = {"initial_scale": 64, "window": 3, "hysteresis": 2}
    pattern = "x..x...xx.."
    whole, first = LossScaler(**options), LossScaler(**options)
    expected = scales(whole, pattern)
    found = scales(first, pattern[:split])
    second = LossScaler(**options)
    second.load(first.state())
    assert found + scales(second, pattern[split:]) == expected
    assert second.state() == whole.state()


def test_a_state_of_other_options_is_brought_into_range() -> None:
    scaler = LossScaler(window=5, hysteresis=1, min_scale=16)
    scaler.load({"scale": 2, "good": 80, "left": 4})
    assert scaler.state() == {"scale": 16, "good": 4, "left": 1}
    fixed = LossScaler(scale=8)
    fixed.load({"scale": 2, "good": 0, "left": 1})
    assert fixed.scale == 8
