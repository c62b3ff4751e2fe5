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
    """Count the storages; the optimizer's state appears with its first step.

    What lives in the host's memory instead of the device's, or on disk, is not counted.
    """
    flats = parts.shards.all()
    held = [flat.data for flat in flats if flat.of is None]
    frozen = {
        parameter
        for unit in parts.units
        for parameter in unit.module.parameters()
        if not parameter.requires_grad
    }
    return Memory(
        _bytes([*held, *frozen]), _bytes([flat.grad for flat in flats]), _bytes(_optimizer(parts))
    )


def predicted(parts: Parts) -> Memory:
    """What ``memory`` will count once the optimizer has made its state."""
    now = memory(parts)
    made = parts.shards.host is not None or any(parts.optimizer.states())
    return (
        now if made else now._replace(optimizer=now.optimizer + parts.optimizer.predicted_bytes())
    )


def _optimizer(parts: Parts) -> list[Tensor]:
    if parts.shards.host is not None:
        return []
    states = [value for state in parts.optimizer.states() for value in state.values()]
    masters = [f.master for f in parts.shards.trained() if f.master.dtype != f.data.dtype]
    return [*masters, *(value for value in states if isinstance(value, Tensor))]


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
