"""Arguments to parts: the one room that knows every other."""

from .parts import Options, Parts, assemble

__all__ = ["Options", "Parts", "assemble"]
