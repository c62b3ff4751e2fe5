"""Arguments to parts: the one room that knows every other."""

from .options import Options
from .parts import Parts, assemble

__all__ = ["Options", "Parts", "assemble"]
