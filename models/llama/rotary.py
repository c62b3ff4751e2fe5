"""Rotary positions (Su et al., RoFormer, 2021)."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor


def rotate(x: Tensor, theta: float) -> Tensor:
    """Turn the pair (x_i, x_{i + d/2}) at position s by the angle s * theta^(-2i / d).

    x [.., s, d] -> [.., s, d]. The dot product of two turned vectors then depends on the distance
    of their positions alone (equation 16 there, pairs taken half a head apart).
    """
    cos, sin = _angles(x, theta)
    a, b = rearrange(x, "... (two half) -> two ... half", two=2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _angles(x: Tensor, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, d / 2], in fp32 or wider: bf16 cannot tell far positions apart.

    Made anew each time, a thousandth of a block's work, so that a block has no buffer to place.
    """
    length, dim = x.shape[-2:]
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** -(torch.arange(0, dim, 2, dtype=dtype, device=x.device) / dim)
    angle = torch.outer(torch.arange(length, dtype=dtype, device=x.device), frequency)
    return angle.cos(), angle.sin()
