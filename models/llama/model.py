"""Llama (Touvron et al., 2023): RMSNorm, rotary positions, grouped queries, SwiGLU.

With `qkv_bias` it is Qwen2 (Yang et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu

from ..attention import causal_attention
from ..checks import require_length, require_multiple, require_positive
from ..layers import Layers
from ..packed import Packed, pack, unpack
from .rotary import rotate

STD = 0.02
EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """The numbers that make a Llama."""

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    ffn_width: int
    max_seq_len: int
    num_kv_heads: int
    rope_theta: float = 10000.0
    qkv_bias: bool = False
    tied: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self)
        # Rotation turns pairs of features, so a head has an even number of them.
        require_multiple("width", self.width, "2 * model.num_heads", 2 * self.num_heads)
        require_multiple("num_heads", self.num_heads, "model.num_kv_heads", self.num_kv_heads)

    @property
    def residual_std(self) -> float:
        """Start of what adds to x: 2 num_layers such terms keep its variance at any depth."""
        return STD / (2 * self.num_layers) ** 0.5


class Embedding(nn.Module):
    """Tokens [b, s] -> x [b, s, width]; ValueError for more than max_seq_len tokens."""

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        self.max_seq_len = sizes.max_seq_len
        self.token = layers.embedding(sizes.vocab_size, sizes.width, std=STD)
        self.dropout = layers.dropout(sizes.dropout)

    def forward(self, given: Packed) -> Packed:
        """Look up."""
        tokens, documents = unpack(given)
        require_length(tokens.shape[1], self.max_seq_len)
        return pack(self.dropout(self.token(tokens)), documents)


class Block(nn.Module):
    """x [b, s, width] -> [b, s, width]: attention, then a feed-forward, each added to x."""

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(sizes.width, eps=EPS)
        self.attention = Attention(layers, sizes)
        self.norm2 = nn.RMSNorm(sizes.width, eps=EPS)
        self.mlp = SwiGLU(layers, sizes)

    def forward(self, given: Packed) -> Packed:
        """Run both branches on normalised input."""
        x, documents = unpack(given)
        x = x + self.attention(self.norm1(x), documents)
        return pack(x + self.mlp(self.norm2(x)), documents)


class Attention(nn.Module):
    """Causal self-attention, num_kv_heads keys and values for num_heads queries (GQA).

    One projection holds queries, keys and values; a cut over tp falls between groups of heads.
    """

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.width // sizes.num_heads
        self.groups = sizes.num_heads // sizes.num_kv_heads
        self.theta = sizes.rope_theta
        width, kv_width = sizes.width, sizes.num_kv_heads * self.head_dim
        blocks = (width, kv_width, kv_width)
        self.qkv = layers.column(width, sum(blocks), bias=sizes.qkv_bias, std=STD, blocks=blocks)
        self.dropout = layers.dropout(sizes.dropout, cut=True)
        self.out = layers.row(width, width, bias=False, std=sizes.residual_std)
        self.out_dropout = layers.dropout(sizes.dropout)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """[b, s, width] -> [b, s, width] through the heads that are here."""
        heads = rearrange(self.qkv(x), "b s (h d) -> b h s d", d=self.head_dim)
        kv = heads.shape[1] // (self.groups + 2)
        qk, v = heads.split([(self.groups + 1) * kv, kv], dim=1)
        # Only distances matter here, so that documents need no positions of their own.
        q, k = rotate(qk, self.theta).split([self.groups * kv, kv], dim=1)
        y = causal_attention(q, k, v, self.dropout, documents)
        return self.out_dropout(self.out(rearrange(y, "b h s d -> b s (h d)")))


class SwiGLU(nn.Module):
    """x -> down(silu(gate(x)) * up(x)) (Shazeer, 2020), gate and up in one product."""

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        width, ffn_width = sizes.width, sizes.ffn_width
        self.gate_up = layers.column(width, 2 * ffn_width, bias=False, std=STD, blocks=2)
        self.down = layers.row(ffn_width, width, bias=False, std=sizes.residual_std)
        self.dropout = layers.dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, width] -> [b, s, width] through the hidden features that are here."""
        gate, up = rearrange(self.gate_up(x), "b s (two f) -> two b s f", two=2)
        return self.dropout(self.down(silu(gate) * up))


class Head(nn.Module):
    """x [b, s, width] -> logits [b, s, vocab_size], cut over tp as the output layer is."""

    def __init__(self, layers: Layers, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.width, eps=EPS)
        self.logits = layers.logits(sizes.width, sizes.vocab_size, std=STD)

    def forward(self, given: Packed) -> Tensor:
        """Normalise and project."""
        x, _ = unpack(given)
        return self.logits(self.norm(x))
