"""Causal attention: one function for every model."""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .layers import AnyDropout


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: AnyDropout) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, where a position sees itself and what came before.

    q [b, h * g, s, d]; k and v [b, h, s, d], each shared by g neighbouring heads of q (Ainslie et
    al., GQA, 2023) -> [b, h * g, s, d]. `dropout` falls on the probabilities.
    """
    groups = q.shape[1] // k.shape[1]
    if dropout.p == 0 or not dropout.training:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
    # The fused kernel would draw a mask of its own; this one is `dropout`'s on any device.
    q = rearrange(q, "b (h g) s d -> b h g s d", g=groups)
    scores = einsum(q, k, "b h g s d, b h t d -> b h g s t") * q.shape[-1] ** -0.5
    future = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    shares = dropout(scores.masked_fill(future, -torch.inf).softmax(-1))
    return rearrange(
        einsum(shares, v, "b h g s t, b h t d -> b h g s d"), "b h g s d -> b (h g) s d"
    )
