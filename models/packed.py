"""Rows that hold several documents, whose ids travel with the activations.

A unit is given x, or (x, documents) with an integer for each token, and hands on what it was given.
A document is a run of equal ids along s; where the ids are left out, a row is one document.
"""

from __future__ import annotations

import torch
from torch import Tensor

Packed = Tensor | tuple[Tensor, Tensor]


def unpack(given: Packed) -> tuple[Tensor, Tensor | None]:
    """x [b, s, ..] and its documents [b, s]; ValueError for ids that do not fit x."""
    if isinstance(given, Tensor):
        return given, None
    x, documents = given
    # Ids in bf16 would be rounded, and documents become one.
    if documents.shape != x.shape[:2] or documents.is_floating_point():
        raise ValueError(
            f"documents of shape {tuple(documents.shape)} and {documents.dtype} do not fit x of "
            f"shape {tuple(x.shape)}: give an integer for each token, {tuple(x.shape[:2])}"
        )
    return x, documents


def pack(x: Tensor, documents: Tensor | None) -> Packed:
    """What `unpack` takes apart."""
    return x if documents is None else (x, documents)


def starts(documents: Tensor) -> Tensor:
    """For each token the index at which its document starts in its row; int64 [b, s]."""
    index = torch.arange(documents.shape[1], device=documents.device)
    goes_on = torch.zeros_like(documents, dtype=torch.bool)
    goes_on[:, 1:] = documents[:, 1:] == documents[:, :-1]
    return index.expand_as(documents).masked_fill(goes_on, 0).cummax(1).values


def positions(documents: Tensor) -> Tensor:
    """Where each token stands in its document, from 0; int64 [b, s]."""
    start = starts(documents)
    return torch.arange(start.shape[1], device=start.device) - start


def visible(documents: Tensor) -> Tensor:
    """Whether the token s sees the token t: of its document and not later; bool [b, s, t]."""
    start = starts(documents)
    index = torch.arange(start.shape[1], device=start.device)
    return (start[:, :, None] <= index) & (index <= index[:, None])
