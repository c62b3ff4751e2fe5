"""Packed rows taken apart: each document on a row of its own, padded at its end."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor


class Apart(NamedTuple):
    """Documents [n, longest]: padding is the token 0 with a target of -100."""

    x: Tensor
    target: Tensor
    places: list[tuple[int, int, int]]
    """Of each document: its packed row, where it starts there, and its length."""


def apart(tokens: Tensor, documents: Tensor, target: Tensor) -> Apart:
    """The documents of packed rows [b, s], in order; plain loops over plain lists."""
    places = []
    for row, ids in enumerate(documents.tolist()):
        at = 0
        for _, run in groupby(ids):
            length = len(list(run))
            places.append((row, at, length))
            at += length
    longest = max(length for _, _, length in places)
    x = torch.zeros(len(places), longest, dtype=torch.int64)
    padded = torch.full_like(x, -100)
    for n, (row, at, length) in enumerate(places):
        x[n, :length] = tokens[row, at : at + length]
        padded[n, :length] = target[row, at : at + length]
    return Apart(x, padded, places)


def together(output: Tensor, places: list[tuple[int, int, int]]) -> Tensor:
    """What a model gives for each document, [n, longest, v], without the padding: [b * s, v]."""
    return torch.cat([output[n, :length] for n, (_, _, length) in enumerate(places)])
