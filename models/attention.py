"""Causal attention: one function for every model."""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .layers import AnyDropout
from .packed import visible


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: AnyDropout, documents: Tensor | None = None
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, where a position sees itself and what came before.

    q [b, h * g, s, d]; k and v [b, h, s, d], each shared by g neighbouring heads of q (Ainslie et
    al., GQA, 2023) -> [b, h * g, s, d]. `dropout` falls on the probabilities. With `documents`
    [b, s] it sees no further back than its document; their mask has b * s * s booleans.
    """
    groups = q.shape[1] // k.shape[1]
    seen = None if documents is None else visible(documents)
    if dropout.p == 0 or not dropout.training:
        if seen is None:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
        return _masked(q, k, v, seen)
    # The fused kernel would draw a mask of its own; this one is `dropout`'s on any device.
    q = rearrange(q, "b (h g) s d -> b h g s d", g=groups)
    scores = einsum(q, k, "b h g s d, b h t d -> b h g s t") * q.shape[-1] ** -0.5
    if seen is None:
        hidden = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    else:
        hidden = ~seen[:, None, None]
    shares = dropout(scores.masked_fill(hidden, -torch.inf).softmax(-1))
    return rearrange(
        einsum(shares, v, "b h g s t, b h t d -> b h g s d"), "b h g s d -> b (h g) s d"
    )


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    # Few fused kernels take a mask together with groups, so every head of q has its own k and v.
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
