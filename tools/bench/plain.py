"""The benchmark's reference: a Llama-style model and its training step in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, LAYERS, HEADS, FFN, SEQ = 256, 256, 8, 8, 768, 256
BATCH, MICRO = 32, 2


class Size(NamedTuple):
    """Of the model and of a batch."""

    width: int = WIDTH
    num_layers: int = LAYERS
    ffn_width: int = FFN
    seq_len: int = SEQ
    batch: int = BATCH


USUAL = Size()


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of ``[b, h, s, d]``, in halves."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[-2])[:, None] * rate
    cos, sin = torch.cos(angle).repeat(1, 2), torch.sin(angle).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm."""

    def __init__(self, size: Size = USUAL) -> None:
        super().__init__()
        width, ffn = size.width, size.ffn_width
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[b, s, d]`` to the same."""
        b, s, d = x.shape
        parts = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Reference:
    """One process, all cores: forward and backward by microbatch, then a fused AdamW step."""

    def __init__(self, size: Size = USUAL) -> None:
        torch.manual_seed(0)
        self.size = size
        self.model = nn.Sequential(
            nn.Embedding(VOCAB, size.width),
            *(Block(size) for _ in range(size.num_layers)),
            nn.RMSNorm(size.width, eps=1e-5),
            nn.Linear(size.width, VOCAB, bias=False),
        )
        for parameter in self.model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)

    def step(self, number: int, rank: int = 0, ranks: int = 1) -> float:
        """Train on one batch, or on a rank's share of it; returns the loss per token."""
        x, target = (part.chunk(ranks)[rank] for part in batch(number, self.size))
        total = 0.0
        for part, wanted in zip(x.split(MICRO), target.split(MICRO), strict=True):
            logits = self.model(part)
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
            (loss / target.numel()).backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total / target.numel()


def batch(number: int, size: Size = USUAL) -> tuple[Tensor, Tensor]:
    """``[32, 256]`` ids and the next ones: sequences that count up by a constant."""
    generator = torch.Generator().manual_seed(number)
    first = torch.randint(VOCAB, (size.batch, 1), generator=generator)
    by = torch.randint(1, 8, (size.batch, 1), generator=generator)
    tokens = (first + by * torch.arange(size.seq_len + 1)) % VOCAB
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
