"""Corpora as memory-mapped token files, and batches as a pure function of (seed, step, slot)."""

from .batches import TokenFiles
from .build import prepare
from .prefetch import Prefetch
from .store import TokenStore, TokenWriter
from .tokenizer import Tokenizer, load_tokenizer, make_tokenizer

__all__ = [
    "Prefetch",
    "TokenFiles",
    "TokenStore",
    "TokenWriter",
    "Tokenizer",
    "load_tokenizer",
    "make_tokenizer",
    "prepare",
]
