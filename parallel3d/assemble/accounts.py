"""What a training step of this rank sends and keeps at most for parameters, on paper."""

from __future__ import annotations

from typing import NamedTuple

from ..zero.accounts import Sent, gathered, gradient_bytes, sent
from .parts import Parts
from .uses import touches_of, uses_of


class Account(NamedTuple):
    """Bytes of a rank: what it sends; the most of gradients; and what it gathers at most at once.

    Gradients are those that stay, are lent to a backward and are being summed.
    """

    sent: Sent
    gradients: int
    gathered: int


def account(parts: Parts, num_microbatches: int | None = None) -> Account:
    """Of a step of so many microbatches, the engine's own number by default."""
    count = num_microbatches or parts.programs.num_microbatches
    actions, units = parts.programs.mine(count), parts.unit_numbers
    uses = uses_of(actions, units)
    return Account(
        sent(parts.shards, uses, count)._replace(optimizer=parts.optimizer.sent()),
        gradient_bytes(parts.shards, touches_of(actions, units)),
        gathered(parts.shards, uses).peak,
    )
