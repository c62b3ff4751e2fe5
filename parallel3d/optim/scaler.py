"""The loss scale of fp16: gradients kept inside the range of a narrow dtype.

fp16 has nothing between zero and 2^-24, where many gradients lie. So the loss is multiplied by a
scale before the backward, and the update divides by it (Micikevicius et al., 2018, arXiv
1710.03740). The scale looks for the largest that does not overflow.
"""

from __future__ import annotations

from collections.abc import Mapping

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

    Values are those that ``config.shared.check_loss_scale`` lets through.
    """

    def __init__(
        self,
        initial_scale: float = 65536.0,
        window: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1.0,
        scale: float | None = None,
    ) -> None:
        self.scale = float(initial_scale if scale is None else scale)
        self.window, self.hysteresis, self.min_scale = window, hysteresis, float(min_scale)
        self.fixed = scale is not None
        self._good, self._left = 0, hysteresis

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
