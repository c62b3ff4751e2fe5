"""Layers cut over a tensor-parallel axis, their loss, and the autograd doors they are made of."""

from .dropout import Dropout
from .linear import ColumnParallelLinear, RowParallelLinear
from .loss import vocab_parallel_cross_entropy
from .regions import copy_to, gather_from, reduce_from, split_to
from .vocabulary import VocabParallelEmbedding, VocabParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "VocabParallelLinear",
    "copy_to",
    "gather_from",
    "reduce_from",
    "split_to",
    "vocab_parallel_cross_entropy",
]
