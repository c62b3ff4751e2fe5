"""GPT-2 (Radford et al., 2019): learned positions, pre-norm blocks, GELU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import embedding, gelu

from ..attention import causal_attention
from ..checks import require_length, require_multiple, require_positive
from ..layers import Layers
from ..packed import Packed, pack, positions, unpack

STD = 0.02


@dataclass(frozen=True)
class Sizes:
    """The numbers that make a GPT."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    ffn_width: int
    max_seq_len: int
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self)
        require_multiple("width", self.width, "model.num_heads", self.num_heads)

    @property
    def residual_std(self) -> float:
        """Start of what adds to x: 2 num_layers such terms keep its variance at any depth."""
        return STD / (2 * self.num_layers) ** 0.5


class Embedding(nn.Module):
    """Tokens [b, s] -> x [b, s, width]: what a token is, plus where it stands."""

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        self.token = layers.embedding(sizes.vocab_size, sizes.width, std=STD)
        self.position = Positions(sizes.max_seq_len, sizes.width)
        self.dropout = layers.dropout(sizes.dropout)

    def forward(self, given: Packed) -> Packed:
        """Look up and add."""
        tokens, documents = unpack(given)
        x = self.dropout(self.position(self.token(tokens), documents))
        return pack(x, documents)


class Positions(nn.Module):
    """x [b, s, width] -> x + weight[:s]: a learned vector for each of max_seq_len positions.

    They start anew in each of the documents [b, s].
    """

    def __init__(self, max_seq_len: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_seq_len, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from N(0, 0.02)."""
        nn.init.normal_(self.weight, std=STD)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Add the first s positions; ValueError for a sequence longer than max_seq_len."""
        length = x.shape[1]
        require_length(length, self.weight.shape[0])
        if documents is None:
            return x + self.weight[:length]
        return x + embedding(positions(documents), self.weight)


class Block(nn.Module):
    """x [b, s, width] -> [b, s, width]: attention, then a feed-forward, each added to x."""

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width)
        self.attention = Attention(layers, sizes)
        self.norm2 = nn.LayerNorm(sizes.width)
        self.mlp = FeedForward(layers, sizes)

    def forward(self, given: Packed) -> Packed:
        """Run both branches on normalised input."""
        x, documents = unpack(given)
        x = x + self.attention(self.norm1(x), documents)
        return pack(x + self.mlp(self.norm2(x)), documents)


class Attention(nn.Module):
    """Causal self-attention of num_heads heads; a cut over tp falls between heads."""

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.head_dim = width // sizes.num_heads
        self.qkv = layers.column(width, 3 * width, bias=True, std=STD, blocks=3)
        self.dropout = layers.dropout(sizes.dropout, cut=True)
        self.out = layers.row(width, width, bias=True, std=sizes.residual_std)
        self.out_dropout = layers.dropout(sizes.dropout)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """[b, s, width] -> [b, s, width] through the h heads that are here."""
        q, k, v = rearrange(
            self.qkv(x), "b s (three h d) -> three b h s d", three=3, d=self.head_dim
        )
        y = causal_attention(q, k, v, self.dropout, documents)
        return self.out_dropout(self.out(rearrange(y, "b h s d -> b s (h d)")))


class FeedForward(nn.Module):
    """[b, s, width] -> [b, s, ffn_width] -> [b, s, width], with GELU (its tanh form) between."""

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        self.up = layers.column(sizes.width, sizes.ffn_width, bias=True, std=STD)
        self.down = layers.row(sizes.ffn_width, sizes.width, bias=True, std=sizes.residual_std)
        self.dropout = layers.dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Widen, bend, narrow."""
        return self.dropout(self.down(gelu(self.up(x), approximate="tanh")))


class Head(nn.Module):
    """x [b, s, width] -> logits [b, s, vocab_size], cut over tp as the output layer is."""

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.logits = layers.logits(sizes.width, sizes.vocab_size, std=STD)

    def forward(self, given: Packed) -> Tensor:
        """Normalise and project."""
        x, _ = unpack(given)
        return self.logits(self.norm(x))
