"""3D-parallel training: pipeline, tensor and ZeRO data parallelism, under one law.

No layout changes the numbers. The public names below load on first use, so that
``import parallel3d`` costs torch and einops and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, StepResult
    from .tensor import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )
    from .topology import Axis, Grid, Topology

_ROOMS = {
    "Axis": "topology",
    "ColumnParallelLinear": "tensor",
    "Engine": "engine",
    "Grid": "topology",
    "RowParallelLinear": "tensor",
    "StepResult": "engine",
    "Topology": "topology",
    "VocabParallelEmbedding": "tensor",
    "vocab_parallel_cross_entropy": "tensor",
}

__all__ = [
    "Axis",
    "ColumnParallelLinear",
    "Engine",
    "Grid",
    "RowParallelLinear",
    "StepResult",
    "Topology",
    "VocabParallelEmbedding",
    "vocab_parallel_cross_entropy",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_ROOMS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
