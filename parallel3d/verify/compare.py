"""How far two runs are apart, in numbers and in bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .trace import Run, Tensors, Trace

NOISE = 1e-12  # a tensor this small beside the model's largest is zero but for rounding
PARAMETERS = ("gradient", "sgd", "adamw")  # columns with an error per parameter


class Cell(NamedTuple):
    """The largest error of a column; ``name`` is the first tensor beyond ``tolerance``, or ''."""

    error: float
    tolerance: float
    name: str = ""

    @property
    def passes(self) -> bool:
        """Whether the error is within tolerance; one that is not a number is not."""
        return self.error <= self.tolerance


def cells(ours: Trace, true: Trace, tolerance: float) -> dict[str, Cell]:
    """Every column of a case, against the reference; AdamW's weights may be 100 times as far.

    AdamW divides by the root of its second moment, which magnifies rounding where that is small.
    """
    sgd, wide = (ours["sgd"], true["sgd"]), 100 * tolerance
    return {
        "loss": Cell(_numbers(sgd[0].losses, sgd[1].losses), tolerance),
        "gradient": _cell(sgd[0].gradients, sgd[1].gradients, tolerance),
        "norm": Cell(_numbers(sgd[0].norms, sgd[1].norms), tolerance),
        "sgd": _cell(sgd[0].weights, sgd[1].weights, tolerance),
        "adamw": _cell(ours["adamw"].weights, true["adamw"].weights, wide),
    }


def tensor_errors(ours: Tensors, true: Tensors) -> dict[str, float]:
    """By name, ``max|a - b| / max|b|``.

    Where b is zero but for rounding, as the gradient of a key's bias, the error is counted against
    the largest of the model; where everything is zero, absolutely.
    """
    tops = {name: _top(tensor) for name, tensor in true.items()}
    largest = max(tops.values(), default=0.0)
    errors = {}
    for name, tensor in true.items():
        scale = tops[name] if tops[name] > NOISE * largest else largest
        missing = name not in ours or ours[name].shape != tensor.shape
        apart = torch.inf if missing else _top(ours[name].double() - tensor.double())
        errors[name] = apart / (scale or 1.0)
    return errors


def first_difference(ours: Trace, other: Trace) -> str:
    """The first thing that is not bit-equal, or ''."""
    return next(_differences(ours, other), "")


def _differences(ours: Trace, other: Trace) -> Iterator[str]:
    for optimizer, run in ours.items():
        for what in ("losses", "norms"):
            pairs = zip(getattr(run, what), getattr(other[optimizer], what), strict=True)
            for step, (a, b) in enumerate(pairs, 1):
                if a != b:
                    yield f"{what[:-1].replace('losse', 'loss')} of step {step} under {optimizer}"
        yield from (f"gradient of {name}" for name in _unequal(run, other[optimizer], "gradients"))
        for name in _unequal(run, other[optimizer], "weights"):
            yield f"{name} under {optimizer}"


def _unequal(ours: Run, other: Run, what: str) -> Iterator[str]:
    mine, theirs = getattr(ours, what), getattr(other, what)
    for name in theirs:
        if name not in mine or not _same_bits(mine[name], theirs[name]):
            yield name


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def _cell(ours: Tensors, true: Tensors, tolerance: float) -> Cell:
    errors = tensor_errors(ours, true)
    first = next((name for name, error in errors.items() if not error <= tolerance), "")
    # Not max(): that would lose an error that is not a number.
    worst = torch.tensor([0.0, *errors.values()], dtype=torch.float64).max().item()
    return Cell(worst, tolerance, first)


def _numbers(ours: list[float], true: list[float]) -> float:
    a, b = (torch.tensor(numbers, dtype=torch.float64) for numbers in (ours, true))
    return ((a - b).abs() / torch.where(b == 0, 1.0, b.abs())).max().item()


def _top(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
