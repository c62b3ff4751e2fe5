from __future__ import annotations

from dataclasses import replace
from math import inf, isnan, nan

import pytest
import torch
from torch import Tensor

from parallel3d.verify.compare import Cell, cells, first_difference, tensor_errors
from parallel3d.verify.trace import Run, Trace

ONE = torch.ones(2, dtype=torch.float64)
RUN = Run([2.0, 1.0], [1.0, 1.0], {"a": ONE, "b": ONE}, {"a": ONE, "b": ONE}, [])
TRACE: Trace = {"sgd": RUN, "adamw": RUN}


def under_sgd(**changes: object) -> Trace:
    return {**TRACE, "sgd": replace(RUN, **changes)}


def errors(ours: list[float], true: list[float]) -> float:
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (ours, true))
    return tensor_errors({"x": a, "y": ONE}, {"x": b, "y": ONE})["x"]


def test_an_error_is_relative_to_the_tensors_largest_element() -> None:
    assert errors([1.0, 4.5], [1.0, 4.0]) == 0.5 / 4
    assert errors([2.0, 4.0], [1.0, 4.0]) == 1 / 4


def test_a_tensor_that_is_zero_but_for_rounding_counts_against_the_models_largest() -> None:
    assert errors([0.25, 0.0], [0.0, 0.0]) == 0.25
    assert errors([3e-17, 0.0], [1e-17, 0.0]) == pytest.approx(2e-17)


def test_where_everything_is_zero_an_error_is_absolute() -> None:
    zero = torch.zeros(1)
    assert tensor_errors({"x": zero + 0.5}, {"x": zero}) == {"x": 0.5}


def test_a_tensor_that_is_missing_or_of_another_shape_is_infinitely_off() -> None:
    assert tensor_errors({}, {"x": ONE}) == {"x": inf}
    assert tensor_errors({"x": ONE[:1]}, {"x": ONE}) == {"x": inf}


def test_equal_traces_pass_at_tolerance_0() -> None:
    found = cells(TRACE, TRACE, 0.0)
    assert all(cell == Cell(0.0, 0.0) and cell.passes for cell in found.values())
    assert first_difference(TRACE, TRACE) == ""


def test_the_first_parameter_beyond_tolerance_is_named_not_the_worst() -> None:
    found = cells(under_sgd(gradients={"a": 1.1 * ONE, "b": 3 * ONE}), TRACE, 1e-3)["gradient"]
    assert (found.name, found.error) == ("a", pytest.approx(2.0))


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("column", ["gradients", "weights", "losses", "norms"])
def test_what_is_not_finite_fails(column: str, bad: float) -> None:
    value = [bad, 1.0] if column in ("losses", "norms") else {"a": bad * ONE, "b": ONE}
    failing = list(cells(under_sgd(**{column: value}), TRACE, 1.0).values())
    (cell,) = [cell for cell in failing if not cell.passes]
    assert isnan(cell.error) or cell.error == inf


def test_adamw_may_be_a_hundred_times_as_far() -> None:
    off: dict[str, Tensor] = {"a": ONE * (1 + 50e-12), "b": ONE}
    trace = {name: replace(RUN, weights=off) for name in TRACE}
    found = cells(trace, TRACE, 1e-12)
    assert found["adamw"].passes and not found["sgd"].passes


def test_bits_see_the_last_one_and_the_sign_of_zero() -> None:
    last = torch.nextafter(ONE, 2 * ONE)
    assert first_difference(under_sgd(gradients={"a": ONE, "b": last}), TRACE) == "gradient of b"
    zero = under_sgd(weights={"a": ONE, "b": 0 * ONE})
    minus = under_sgd(weights={"a": ONE, "b": -0.0 * ONE})
    assert first_difference(zero, minus) == "b under sgd"
    assert first_difference(under_sgd(losses=[2.0, 1.5]), TRACE) == "loss of step 2 under sgd"
    assert first_difference(under_sgd(norms=[1.5, 1.0]), TRACE) == "norm of step 1 under sgd"
