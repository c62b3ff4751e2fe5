"""Learning-rate curves: pure functions of the step, as a factor of the learning rate.

Steps count from 0. Every curve rises linearly over the warm-up, from 1 / warmup_steps at the first
step to 1 at the last of it, and reaches its end value at the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

WSD_DECAY = 0.2  # share of the steps; Hägele et al. (2024, arXiv 2405.18392) find 10-20% enough

Shape = Callable[[float], float]


def lr_curve(
    name: str, steps: int, warmup_steps: int = 0, min_ratio: float = 0.0
) -> Callable[[int], float]:
    """The factor at each step.

    Args:
        name: `constant`; `linear` and `cosine` (Loshchilov and Hutter, 2017) fall from the end of
            the warm-up to the last step; `wsd` (warm-up, stable, decay: Hu et al., 2024) stays at 1
            and falls linearly over the last fifth of all steps.
        steps: of the whole run; a later step has the factor of the last.
        warmup_steps: may exceed `steps`, then the run ends while it still rises.
        min_ratio: the last factor, where the curve falls.

    Raises:
        ValueError: an unknown name.
    """
    if name not in SHAPES:
        raise ValueError(f"optim.lr_schedule = {name!r} is not one of {', '.join(SHAPES)}")
    start = max(warmup_steps, steps - round(WSD_DECAY * steps)) if name == "wsd" else warmup_steps
    length = max(1, steps - start)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, max(0, step + 1 - start) / length)
        return min_ratio + (1 - min_ratio) * SHAPES[name](progress)

    return factor


SHAPES: dict[str, Shape] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "wsd": lambda progress: 1.0 - progress,
}
"""What is left at each share of the fall, from 1 at 0; `constant` never falls."""


def factor_of(lr_schedule: Callable[[int], float] | None, updates: int) -> float:
    """The factor of the learning rate after so many updates; 1 without a schedule.

    Raises ValueError for one that would spoil the weights.
    """
    factor = 1.0 if lr_schedule is None else float(lr_schedule(updates))
    if not 0 <= factor < math.inf:
        raise ValueError(
            f"lr_schedule({updates}) = {factor}: it gives a factor of the learning rate, a finite "
            f"number that is 0 or more"
        )
    return factor
