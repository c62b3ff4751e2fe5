"""What is known of one training step, and the clock that measures it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Record:
    """One line of ``metrics.jsonl``; the fields are its keys, in its order.

    ``loss`` and ``grad_norm`` are of the whole job; ``grad_norm`` is the norm **before** clipping,
    so it may stand above ``train.max_grad_norm`` while the update does not. ``tokens`` counts from
    the first step of the run, ``tokens_per_second`` is of the whole job, ``mfu`` is a fraction of
    the peak of all devices (None where that is not known). ``peak_memory_bytes`` is the largest of
    the ranks, ``memory_*`` are rank 0's bytes, ``bytes_*`` were sent in this step by all ranks
    together. ``val_loss`` is None in a step that was not followed by an evaluation. The keys of
    ``stage_bubble`` are ``stage/0/bubble`` and on: see ``memory.Stage``. ``loss_scale``, in fp16
    alone, is that of the step to come.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    tokens: int
    tokens_per_second: float
    step_seconds: float
    peak_memory_bytes: int
    memory_parameters: int
    memory_gradients: int
    memory_optimizer: int
    mfu: float | None
    bytes_pp: int
    bytes_dp: int
    bytes_tp: int
    val_loss: float | None = None
    stage_bubble: tuple[float, ...] = ()
    loss_scale: float | None = None

    def row(self) -> dict[str, int | float | bool | None]:
        """The record as strict JSON takes it: not-finite is None, a missing ``val_loss`` or
        ``loss_scale`` no key."""
        row = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
            if key != "stage_bubble"
        }
        for key in ("val_loss", "loss_scale"):
            if getattr(self, key) is None:
                del row[key]
        return row | {f"stage/{k}/bubble": bubble for k, bubble in enumerate(self.stage_bubble)}


class Meter:
    """Times steps, counts tokens and computes the rates of a step.

    Args:
        tokens: tokens seen before the first step to come (a resumed run's count).
        flops_per_token: model FLOPs of one token, forward and backward; see ``cost``.
        peak_flops: FLOP/s of all devices together; None: ``mfu`` is None.
        clock: seconds, rising.

    Example:
        >>> ticks = iter([0.0, 0.5])
        >>> meter = Meter(flops_per_token=10, peak_flops=1e4, clock=lambda: next(ticks))
        >>> with meter.timed(tokens=100):
        ...     pass
        >>> meter.tokens, meter.step_seconds, meter.tokens_per_second, meter.mfu
        (100, 0.5, 200.0, 0.2)
    """

    def __init__(
        self,
        *,
        tokens: int = 0,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tokens = tokens
        self.step_seconds = 0.0
        self.tokens_per_second = 0.0
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._clock = clock

    @contextmanager
    def timed(self, tokens: int) -> Iterator[None]:
        """Measure the block as one step over ``tokens`` tokens of the whole job.

        A block that raises is no step: it leaves the count as it was.
        """
        began = self._clock()
        yield
        self.step_seconds = self._clock() - began
        self.tokens += tokens
        self.tokens_per_second = tokens / self.step_seconds if self.step_seconds > 0 else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs of the last step over what the devices could do in its time."""
        if self._flops_per_token is None or self._peak_flops is None:
            return None
        return self.tokens_per_second * self._flops_per_token / self._peak_flops

    def rates(self) -> dict[str, Any]:
        """The fields of a ``Record`` that the meter knows, for the step that was timed last."""
        return {
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.step_seconds,
            "mfu": self.mfu,
        }
