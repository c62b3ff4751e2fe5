from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.optim.schedule import SHAPES, lr_curve


@pytest.mark.parametrize("name", SHAPES)
def test_the_warm_up_is_linear_and_ends_at_one(name: str) -> None:
    factor = lr_curve(name, steps=100, warmup_steps=4)
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_a_falling_curve_ends_at_the_least_factor_and_stays(name: str) -> None:
    factor = lr_curve(name, steps=50, warmup_steps=5, min_ratio=0.1)
    assert factor(48) > factor(49) == pytest.approx(0.1)
    assert factor(70) == factor(49)


def test_cosine_is_halfway_in_the_middle() -> None:
    factor = lr_curve("cosine", steps=20, warmup_steps=0, min_ratio=0.0)
    assert factor(9) == pytest.approx(0.5)
    assert factor(4) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))


def test_wsd_is_one_until_the_last_fifth() -> None:
    factor = lr_curve("wsd", steps=100, warmup_steps=10, min_ratio=0.0)
    assert {factor(step) for step in range(9, 80)} == {1.0}
    assert factor(89) == pytest.approx(0.5)


def test_constant_stays_at_one() -> None:
    assert {lr_curve("constant", steps=10)(step) for step in range(30)} == {1.0}


@given(
    name=st.sampled_from(sorted(SHAPES)),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 80),
    least=st.floats(0, 1),
)
def test_a_factor_never_leaves_its_bounds(name: str, steps: int, warmup: int, least: float) -> None:
    factor = lr_curve(name, steps, warmup, least)
    factors = [factor(step) for step in range(steps + 5)]
    assert all(0 <= each <= 1 + 1e-12 for each in factors)
    after = factors[warmup:]
    assert all(b <= a + 1e-12 for a, b in pairwise(after))


def test_an_unknown_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="'square' is not one of constant, linear"):
        lr_curve("square", steps=10)
