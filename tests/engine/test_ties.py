"""A parameter that units on several pipeline ranks use is one parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.cases import error, same
from tests.engine.tie_cases import CASES, MAX_NORM, plainly, under

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "two stages": ("2x1x1", {}),
    "two stages, everything whole": ("2x1x1", {"zero": 0}),
    "four stages": ("4x1x1", {}),
    "data parallel": ("2x2x1", {}),
    "data parallel, everything whole": ("2x2x1", {"zero": 0}),
    "tensor parallel": ("2x1x2", {}),
    "first and last stage on one rank": ("2x1x1", {"schedule": "zbv"}),
    "first and last of eight stages": ("4x1x1", {"schedule": "zbv", "zero": 0}),
    "weight gradients put off": ("4x1x1", {"schedule": "zb-h1"}),
    "interleaved, recompute": ("2x1x1", {"schedule": "interleaved", "recompute": "full"}),
    "gpipe, recompute": ("4x1x1", {"schedule": "gpipe", "recompute": "full"}),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_tie_between_any_units_equals_plain_pytorch_and_one_stage_in_bits(run: str) -> None:
    layout, options = RUNS[run]
    runs, one_stage = under(layout, **options), under(f"1{layout[1:]}")
    for case in CASES:
        trained, near = runs[case], one_stage[case]
        true = plainly(*case, trained.initial)
        torch.testing.assert_close(trained.numbers, true.numbers, rtol=1e-11, atol=0)
        assert min(norm for _, norm in true.numbers) > MAX_NORM, "clipping acts"
        assert error(trained.weights, true.weights) < (1e-12 if case[1] == "sgd" else 1e-10), case
        assert same(trained.initial, near.initial) and same(trained.weights, near.weights), case
        assert trained.numbers == near.numbers, case
