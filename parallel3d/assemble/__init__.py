"""Arguments to parts: the one room that knows every other."""

from .options import Offload, Options
from .parts import Parts, assemble

__all__ = ["Offload", "Options", "Parts", "assemble"]
