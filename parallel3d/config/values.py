"""One plain value against one type: converted, or refused by the name of its key."""

from __future__ import annotations

import math
import types
from typing import Any, Literal, Union, get_args, get_origin

NAMES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    dict: "a group of keys",
    type(None): "null",
}


class MismatchError(ValueError):
    """The value is not of the type."""


def convert(value: Any, hint: Any, key: str) -> Any:
    """Return `value` as the type `hint`.

    Whole numbers pass as floats and numbers as texts, nothing else changes its kind.

    Raises:
        ValueError: names key, value and what it must be.
    """
    try:
        return _convert(value, hint)
    except MismatchError:
        raise ValueError(f"{key} = {spell(value)} is not {describe(hint)}") from None


def spell(value: Any) -> str:
    """The value as one types it: `null`, `true`, and a text in quotes."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)


def describe(hint: Any) -> str:
    """The type in the user's words."""
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is list:
        return f"a list, each {describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {describe(arguments[0])}"
    return NAMES.get(origin, str(hint))


def _convert(value: Any, hint: Any) -> Any:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Any:
        return value
    if origin is Literal:
        return _member(value, arguments)
    if origin in (Union, types.UnionType):
        return _first(value, arguments)
    if origin is list and isinstance(value, list):
        return [_convert(item, arguments[0]) for item in value]
    if origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        return tuple(_convert(item, each) for item, each in zip(value, arguments, strict=True))
    return _plain(value, origin)


def _member(value: Any, members: tuple[Any, ...]) -> Any:
    for member in members:
        if type(value) is type(member) and value == member:
            return member
    raise MismatchError


def _first(value: Any, hints: tuple[Any, ...]) -> Any:
    # Exact kinds first: 0 is a whole number before it is a text.
    for hint in sorted(hints, key=lambda hint: hint is not type(value)):
        try:
            return _convert(value, hint)
        except MismatchError:
            continue
    raise MismatchError


def _plain(value: Any, kind: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number and math.isfinite(value):
        return float(value)
    if kind is str and number:
        return str(value)
    if kind is not float and type(value) is kind:
        return value
    raise MismatchError
