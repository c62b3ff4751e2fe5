"""Bytes of what a rank keeps for the whole of a run, by kind, and of the memory it has for that."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

import torch
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
    shards = parts.shards
    here = [flat for flat in shards.held() if flat.bring is None]
    held = [flat.shard if shards.keeps_owned else flat.data for flat in here]
    frozen = {
        parameter
        for unit in parts.units
        for parameter in unit.module.parameters()
        if not parameter.requires_grad and not shards.keeps_owned
    }
    gradients = [flat.owned_grad if flat.stage >= 2 else flat.grad for flat in shards.all()]
    return Memory(_bytes([*held, *frozen]), _bytes(gradients), _bytes(_optimizer(parts)))


def predicted(parts: Parts) -> Memory:
    """What ``memory`` will count once the optimizer has made its state."""
    now = memory(parts)
    made = parts.shards.host is not None or any(parts.optimizer.states())
    return (
        now if made else now._replace(optimizer=now.optimizer + parts.optimizer.predicted_bytes())
    )


def device_bytes(device: torch.device) -> int:
    """All the memory of a CUDA device; of a CPU the machine's, which its ranks share."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _optimizer(parts: Parts) -> list[Tensor]:
    if parts.shards.host is not None:
        return []
    states = [value for state in parts.optimizer.states() for value in state.values()]
    trained = parts.shards.trained()
    masters = [f.master for f in trained if f.master.dtype != f.data.dtype or f.bring is not None]
    return [*masters, *(value for value in states if isinstance(value, Tensor))]


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
