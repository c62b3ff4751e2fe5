"""The arguments of the command, key=value, each read and judged for itself."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from ..topology import Grid
from .suites import SCHEDULES


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Values by key; raises ValueError with the value, the rule and the way out."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in READERS:
            close = get_close_matches(key, READERS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(READERS)}"
            raise ValueError(f"{key} is not an argument; {hint}")
        if not equals:
            raise ValueError(f"{argument} has no value: write {key}=VALUE")
        if key in given:
            raise ValueError(f"{key} is given twice, as {given[key]} and {value}: give it once")
        given[key] = value
    return {key: READERS[key](key, value) for key, value in given.items()}


def _list(key: str, value: str) -> list[str]:
    found = [each.strip() for each in value.split(",")]
    if not all(found):
        raise ValueError(f"{key}={value} has an empty place: write {key}=A,B")
    return found


def _layouts(key: str, value: str) -> list[str]:
    return [str(Grid.parse(layout)) for layout in _list(key, value)]


def _one_of(*known: str) -> Callable[[str, str], Any]:
    def read_one(key: str, value: str) -> str:
        if value not in known:
            close = get_close_matches(value, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{key}={value} is not one of {', '.join(known)}{hint}")
        return value

    return read_one


def _some_of(*known: str) -> Callable[[str, str], list[Any]]:
    one = _one_of(*known)
    return lambda key, value: [one(key, each) for each in _list(key, value)]


def _zero(key: str, value: str) -> list[int]:
    return [int(each) for each in _some_of("0", "1", "2", "3")(key, value)]


def _count(what: str) -> Callable[[str, str], int]:
    def read_count(key: str, value: str) -> int:
        if not value.isdecimal() or not int(value):
            raise ValueError(f"{key}={value}: a number of {what} is a whole number from 1 up")
        return int(value)

    return read_count


def _num_chunks(key: str, value: str) -> list[int]:
    return [_count("chunks")(key, each) for each in _list(key, value)]


def _tolerance(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{key}={value}: a tolerance is a number, 0 or more")
    return number


def _part(key: str, value: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", value)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count:
        raise ValueError(f"{key}={value}: a part is K/N with K from 1 to N, for example 1/4")
    return index, count


READERS: dict[str, Callable[[str, str], Any]] = {
    "layouts": _layouts,
    "zero": _zero,
    "schedule": _some_of(*SCHEDULES),
    "num_chunks": _num_chunks,
    "recompute": _some_of("none", "full", "selective"),
    "reduce": _some_of("each", "last"),
    "model": _list,
    "steps": _count("steps"),
    "tolerance": _tolerance,
    "suite": _one_of("quick", "full"),
    "part": _part,
}
