"""Bytes of what a rank keeps for the whole of a run, by kind."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .assemble import Parts


class Memory(NamedTuple):
    """Bytes on this rank; fp32 masters apart from the parameters count with the optimizer."""

    parameters: int
    gradients: int
    optimizer: int


def memory(parts: Parts) -> Memory:
    """Count the storages; the optimizer's state appears with its first step."""
    flats = parts.shards.all()
    held = [flat.data for flat in flats if flat.of is None]
    frozen = {
        parameter
        for unit in parts.units
        for parameter in unit.module.parameters()
        if not parameter.requires_grad
    }
    masters = [f.master for f in parts.shards.trained() if f.master.dtype != f.data.dtype]
    states = [
        value
        for state in parts.optimizer.states()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return Memory(
        _bytes([*held, *frozen]), _bytes([flat.grad for flat in flats]), _bytes([*masters, *states])
    )


def predicted(parts: Parts) -> Memory:
    """What ``memory`` will count once the optimizer has made its state."""
    now = memory(parts)
    made = any(parts.optimizer.states())
    return (
        now if made else now._replace(optimizer=now.optimizer + parts.optimizer.predicted_bytes())
    )


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
