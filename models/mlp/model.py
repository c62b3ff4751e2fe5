"""A residual network of feed-forward blocks, for regression (He et al., 2016; pre-norm)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import gelu

from ..checks import require_positive
from ..layers import Layers


@dataclass(frozen=True)
class Sizes:
    """The numbers that make a network; widths are in features."""

    in_features: int
    out_features: int
    width: int
    num_layers: int
    ffn_width: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self)


class Block(nn.Module):
    """x [.., width] -> x + down(gelu(up(norm(x)))) [.., width]."""

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        width, ffn_width = sizes.width, sizes.ffn_width
        self.norm = nn.LayerNorm(width)
        self.up = layers.column(width, ffn_width, bias=True, std=width**-0.5)
        self.down = layers.row(ffn_width, width, bias=True, std=ffn_width**-0.5)
        self.dropout = layers.dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch to x."""
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


class Head(nn.Module):
    """x [.., width] -> prediction [.., out_features], whole on every rank."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.out = nn.Linear(sizes.width, sizes.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and project."""
        return self.out(self.norm(x))
