"""GPT-2 as units: `build` cuts it over tp, `reference` is the same in plain torch.nn."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..checks import require_cut
from ..layers import Layers, Parallel, Plain, tie
from .model import Block, Embedding, Head, Sizes


def build(
    topology: Any,
    vocab_size: int,
    width: int,
    num_layers: int,
    num_heads: int,
    ffn_width: int,
    max_seq_len: int,
    tied: bool = False,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Embedding, num_layers blocks, head: tokens [b, s] -> logits [b, s, ceil(vocab_size / tp)].

    The input may be (tokens, documents [b, s]), integers: a run of equal ones is a document, whose
    positions start at 0 and which sees no other.

    Cut over `topology.tp`. **Equals** `reference` of the same sizes, its logits concatenated over
    tp. ValueError unless tp divides num_heads and ffn_width.
    """
    sizes = Sizes(vocab_size, width, num_layers, num_heads, ffn_width, max_seq_len, tied, dropout)
    require_cut(topology.tp.size, num_heads=num_heads, ffn_width=ffn_width)
    return _units(Parallel(topology.tp), sizes)


def reference(*values: Any, **sizes: Any) -> nn.Sequential:
    """The units of `build` in torch.nn, whole: the same sizes, names and shapes, no topology."""
    return _units(Plain(), Sizes(*values, **sizes))


def _units(layers: Layers, sizes: Sizes) -> nn.Sequential:
    embedding = Embedding(layers, sizes)
    blocks = [Block(layers, sizes) for _ in range(sizes.num_layers)]
    head = Head(layers, sizes)
    if sizes.tied:
        tie(embedding.token, head.logits)
    return nn.Sequential(embedding, *blocks, head)
