"""The loss scale of fp16: gradients kept inside the range of a narrow dtype.

fp16 has nothing between zero and 2^-24, where many gradients lie. So the loss is multiplied by a
scale before the backward, and the update divides by it (Micikevicius et al., 2018, arXiv
1710.03740). The scale looks for the largest that does not overflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

LARGEST = 2.0**64  # gradients that are all zero never overflow: a scale must stay finite in fp32


class LossScaler:
    """A scale, and how it moves from step to step. Powers of two leave all bits as they are.

    Args:
        initial_scale: the scale of the first step.
        window: after so many steps without overflow since the last overflow or rise, it doubles.
        hysteresis: the scale halves with the overflow of this number, counted since it last rose,
            and with each one after that.
        min_scale: it never falls below.
        scale: a fixed one instead, which never moves.

    Raises:
        ValueError: a value out of range.
    """

    def __init__(
        self,
        initial_scale: float = 65536.0,
        window: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        scale: float | None = None,
    ) -> None:
        _check(initial_scale, window, hysteresis, min_scale, scale)
        self.scale = float(initial_scale if scale is None else scale)
        self.window, self.hysteresis, self.min_scale = window, hysteresis, float(min_scale)
        self.fixed = scale is not None
        self._good, self._left = 0, hysteresis

    @classmethod
    def of(cls, precision: str, asked: Mapping[str, Any] | None) -> LossScaler | None:
        """From the engine's arguments: None unless ``precision`` is fp16, which alone needs one."""
        if precision != "fp16":
            if asked is not None:
                raise ValueError(
                    f"fp16 = {dict(asked)} scales the loss of precision='fp16', but precision = "
                    f"{precision!r}: leave it None"
                )
            return None
        known = signature(cls).parameters
        for key in asked or ():
            if key not in known:
                close = get_close_matches(key, known, n=1, cutoff=0.0)
                raise ValueError(f"fp16.{key} is not a key; did you mean fp16.{close[0]}?")
        return cls(**(asked or {}))

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may still be the scale's fault."""
        return not self.fixed and self.scale > self.min_scale

    def update(self, overflow: bool) -> None:
        """After a step: whether its gradients had overflowed."""
        if self.fixed:
            return
        if overflow:
            self._good, self._left = 0, max(0, self._left - 1)
            if self._left == 0:
                self.scale = max(self.scale / 2, self.min_scale)
            return
        self._good += 1
        if self._good == self.window:
            self._good, self._left = 0, self.hysteresis
            self.scale = min(self.scale * 2, LARGEST)

    def state(self) -> dict[str, float]:
        """What goes into a checkpoint."""
        return {"scale": self.scale, "good": self._good, "left": self._left}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from ``state``; a fixed scale stays what it is."""
        if not self.fixed:
            self.scale = max(float(state["scale"]), self.min_scale)
            self._good = min(int(state["good"]), self.window - 1)
            self._left = min(int(state["left"]), self.hysteresis)


def _check(initial: float, window: int, hysteresis: int, least: float, fixed: float | None) -> None:
    for name, value in (("window", window), ("hysteresis", hysteresis)):
        if value < 1:
            raise ValueError(f"fp16.{name} = {value} is below 1: the least is fp16.{name}=1")
    scales = {"min_scale": least, "initial_scale": initial, "scale": fixed}
    for name, scale in scales.items():
        if scale is not None and not (0 < scale <= LARGEST and math.isfinite(scale)):
            raise ValueError(
                f"fp16.{name} = {scale} is not in 0 < fp16.{name} <= 2^64: use a power of two, "
                f"such as 65536"
            )
    if initial < least:
        raise ValueError(
            f"fp16.initial_scale = {initial} is below fp16.min_scale = {least}: raise the one or "
            f"lower the other"
        )
