"""Gradient norm and clipping, optimizers over owned shards, the loss scale, rates over time."""

from .lamb import Lamb
from .muon import Muon

__all__ = ["Lamb", "Muon"]
