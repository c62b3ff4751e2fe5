"""A residual MLP for regression: `build` cuts it over tp, `reference` is plain torch.nn."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..checks import require_cut
from ..layers import Layers, Parallel, Plain
from .model import Block, Head, Sizes


def build(
    topology: Any,
    in_features: int,
    out_features: int,
    width: int,
    num_layers: int,
    ffn_width: int,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Input layer, num_layers blocks, head: x [.., in_features] -> [.., out_features].

    The blocks are cut over `topology.tp`, input and output are whole on every rank. **Equals**
    `reference` of the same sizes. ValueError unless tp divides ffn_width.
    """
    sizes = Sizes(in_features, out_features, width, num_layers, ffn_width, dropout)
    require_cut(topology.tp.size, ffn_width=ffn_width)
    return _units(Parallel(topology.tp), sizes)


def reference(*values: Any, **sizes: Any) -> nn.Sequential:
    """The units of `build` in torch.nn, whole: the same sizes, names and shapes, no topology."""
    return _units(Plain(), Sizes(*values, **sizes))


def _units(layers: Layers, sizes: Sizes) -> nn.Sequential:
    blocks = [Block(layers, sizes) for _ in range(sizes.num_layers)]
    return nn.Sequential(nn.Linear(sizes.in_features, sizes.width), *blocks, Head(sizes))
