"""Causal attention: one function for every model."""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from .layers import AnyDropout


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: AnyDropout) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, where a position sees itself and what came before.

    q [b, h, s, d]; k and v [b, h / groups, s, d], each shared by `groups` neighbouring query heads
    (Ainslie et al., GQA, 2023) -> [b, h, s, d]. `dropout` falls on the probabilities [b, h, s, s].
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (repeat(x, "b h s d -> b (h groups) s d", groups=groups) for x in (k, v))
    if dropout.p == 0 or not dropout.training:
        return scaled_dot_product_attention(q, k, v, is_causal=True)
    # The fused kernel draws its own mask; here the mask must be the one that `dropout` draws.
    scores = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    return dropout(softmax(scores.masked_fill(future, -torch.inf), dim=-1)) @ v
