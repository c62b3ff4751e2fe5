"""What the sizes of a model must satisfy, said in the words of the configuration."""

from __future__ import annotations

from dataclasses import fields
from math import gcd
from typing import Any


def require_positive(sizes: Any) -> None:
    """Raise ValueError unless every int field of the dataclass `sizes` is at least 1."""
    for field in fields(sizes):
        size = getattr(sizes, field.name)
        if field.type == "int" and not (isinstance(size, int) and size >= 1):
            spelt = "null" if size is None else repr(size)
            raise ValueError(
                f"model.{field.name} = {spelt} must be a whole number from 1 up"
                + (": give the vocab_size of the data" if field.name == "vocab_size" else "")
            )


def require_multiple(name: str, value: int, of_name: str, of: int) -> None:
    """Raise ValueError, with the nearest legal values, unless `value` is a multiple of `of`."""
    if value % of:
        near = " or ".join(str(n * of) for n in (value // of, value // of + 1) if n)
        raise ValueError(
            f"model.{name} = {value} must be a multiple of {of_name} = {of}: use {near}"
        )


def require_cut(tp: int, **sizes: int) -> None:
    """Raise ValueError, with the legal degrees, unless tp divides every one of `sizes`."""
    common = gcd(*sizes.values())
    legal = ", ".join(str(degree) for degree in range(1, common + 1) if common % degree == 0)
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(
                f"model.{name} = {size} cannot be cut into topology.tp = {tp} equal parts: "
                f"this model allows topology.tp = {legal}"
            )


def require_length(length: int, max_seq_len: int) -> None:
    """Raise ValueError for a sequence of more tokens than the model has positions."""
    if length > max_seq_len:
        raise ValueError(
            f"a sequence of {length} tokens exceeds model.max_seq_len = {max_seq_len}: "
            f"shorten it (data.seq_len) or set model.max_seq_len={length}"
        )
