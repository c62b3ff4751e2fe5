"""The layers that models are written in: whole ones of torch.nn, or ones cut over an axis.

A model is written once, against the methods below. `Plain` makes it of torch.nn, `Parallel` of the
layers that are cut over tp; parameter names and whole shapes are the same. `std` is the standard
deviation of the initial weight; biases start as zeros.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from parallel3d.tensor import (
    ColumnParallelLinear,
    Dropout,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLinear,
)

Blocks = int | tuple[int, ...]
AnyDropout = nn.Dropout | Dropout


class Plain:
    """Layers of torch.nn, whole on one process."""

    def column(
        self, in_features: int, out_features: int, *, bias: bool, std: float, blocks: Blocks = 1
    ) -> nn.Module:
        """[.., in_features] -> [.., out_features]; `blocks` only says where a cut would fall."""
        return _plain(nn.Linear(in_features, out_features, bias), std)

    def row(self, in_features: int, out_features: int, *, bias: bool, std: float) -> nn.Module:
        """[.., in_features] -> [.., out_features]."""
        return _plain(nn.Linear(in_features, out_features, bias), std)

    def embedding(self, vocab_size: int, width: int, *, std: float) -> nn.Module:
        """Tokens [..] -> [.., width]."""
        return _plain(nn.Embedding(vocab_size, width), std)

    def logits(self, width: int, vocab_size: int, *, std: float) -> nn.Module:
        """[.., width] -> logits [.., vocab_size]."""
        return _plain(nn.Linear(width, vocab_size, bias=False), std)

    def dropout(self, p: float, *, cut: bool = False) -> AnyDropout:
        """Zero a share p of the input; `cut` says that `Parallel` would hold only a part of it."""
        return nn.Dropout(p)


class Parallel:
    """Layers cut over `axis`: between `column` and `row` a rank holds its part of the features."""

    def __init__(self, axis: Any) -> None:
        self.axis = axis

    def column(
        self, in_features: int, out_features: int, *, bias: bool, std: float, blocks: Blocks = 1
    ) -> nn.Module:
        """[.., in_features] -> [.., out_features / tp], cut inside each of the fused `blocks`."""
        layer = ColumnParallelLinear(in_features, out_features, bias, axis=self.axis, blocks=blocks)
        return _parallel(layer, std)

    def row(self, in_features: int, out_features: int, *, bias: bool, std: float) -> nn.Module:
        """[.., in_features / tp] -> [.., out_features], summed over tp."""
        return _parallel(RowParallelLinear(in_features, out_features, bias, axis=self.axis), std)

    def embedding(self, vocab_size: int, width: int, *, std: float) -> nn.Module:
        """Tokens [..] -> [.., width]; each rank looks up its share of the vocabulary."""
        return _parallel(VocabParallelEmbedding(vocab_size, width, axis=self.axis), std)

    def logits(self, width: int, vocab_size: int, *, std: float) -> nn.Module:
        """[.., width] -> logits [.., ceil(vocab_size / tp)], left cut for the loss."""
        return _parallel(VocabParallelLinear(width, vocab_size, axis=self.axis), std)

    def dropout(self, p: float, *, cut: bool = False) -> AnyDropout:
        """Zero a share p: the same over tp, or another on each rank where the input is `cut`."""
        return Dropout(p, axis=self.axis if cut else None)


Layers = Plain | Parallel


def tie(embedding: nn.Module, logits: nn.Module) -> None:
    """Let the output layer use the very Parameter of the embedding, [vocab_size, width]."""
    logits.weight = embedding.weight


def _plain(layer: nn.Linear | nn.Embedding, std: float) -> nn.Module:
    nn.init.normal_(layer.weight, std=std)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def _parallel(layer: Any, std: float) -> nn.Module:
    layer.init_weight = partial(_draw, std)
    if not layer.weight.is_meta:
        layer.reset_parameters()
    return layer


def _draw(std: float, weight: Tensor, fan_in: int) -> None:
    nn.init.normal_(weight, std=std)
