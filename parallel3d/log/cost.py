"""What a token costs the model, what a device could do, and the part of it that was used.

Model FLOPs are those of the mathematics: recomputed activations, padding and communication do not
count, and causal attention counts as full attention. Korthikanti et al. 2022, appendix A:
72 B L s h^2 (1 + s / 6h + V / 12hL) a step, which is 6 per matmul parameter and 12 L s h a token.
"""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from ..placement import placements, whole_shape

# Dense bf16 FLOP/s with fp32 accumulation, from the vendors' data sheets (half of the figures
# "with sparsity"). The first pattern that is found wins, so the special stands before the general.
_PEAKS = (
    (r"\bMIG\b", None),  # a slice of a device: its share of the peak is not in its name
    (r"\bGB200\b", 2500e12),
    (r"\bB200\b", 2250e12),
    (r"\bH200 NVL\b", 835e12),
    (r"\b(G?H200|H800)\b", 989e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH100\b", 989e12),
    (r"\bH20\b", 148e12),
    (r"\bA[18]00\b", 312e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA30\b", 165e12),
    (r"\bA10G\b", 70e12),
    (r"\bA10\b", 125e12),
    (r"\bL40S\b", 362e12),
    (r"\bL40\b", 181e12),
    (r"\bL4\b", 121e12),
    (r"\bRTX 4090\b", 165.2e12),
    (r"\bRTX 3090\b", 71e12),
    (r"\bMI300X\b", 1307.4e12),
    (r"\bMI250X\b", 191.5e12),  # one of the two dies, which is what torch calls a device
)


class Device(NamedTuple):
    """A device's name and its peak in FLOP/s (dense bf16); None where it is not known."""

    name: str
    peak_flops: float | None

    def __str__(self) -> str:
        if self.peak_flops is None:
            return f"{self.name} (peak not known, so no mfu)"
        return f"{self.name} ({self.peak_flops / 1e12:g} TFLOP/s dense bf16)"


def device(of: torch.device) -> Device:
    """The name and peak of a torch device; a CPU has no peak that a table could know."""
    name = torch.cuda.get_device_name(of) if of.type == "cuda" else of.type
    return Device(name, peak_flops(name))


def peak_flops(name: str) -> float | None:
    """Dense bf16 FLOP/s of the device that calls itself ``name``, None if the table lacks it."""
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, name)), None)


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that each token is multiplied with, of the whole model, whatever its cut over tp.

    Matrices count once for each module that uses them, so an output head that is tied to the
    embedding counts once, and the lookup, which is no multiplication, not at all. Vectors (norms,
    biases) are left out.
    """
    placed = placements(model)
    total = 0
    for path, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "num_embeddings"):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim >= 2:
                placement = placed[f"{path}.{name}" if path else name]
                total += prod(whole_shape(placement, tuple(parameter.shape)))
    return total


def flops_per_token(
    num_matmul_parameters: int, *, num_layers: int = 0, width: int = 0, seq_len: int = 0
) -> int:
    """Model FLOPs of one token in training, forward and backward.

    Args:
        num_matmul_parameters: see ``matmul_parameters``; 2 FLOPs forward and 4 backward for each.
        num_layers: attention layers.
        width: heads times head size of one attention layer.
        seq_len: tokens that one token attends to, without the causal mask.
    """
    return 6 * num_matmul_parameters + 12 * num_layers * seq_len * width
