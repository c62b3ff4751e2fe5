"""The proof as a command: key=value arguments to an exit code."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from ..pipeline.schedules import NAMES
from ..topology import Grid
from .cases import LAYOUTS, Case, part, product, quick
from .presets import PRESETS, subject
from .proof import Row, prove
from .ranks import RankError
from .subject import Subject
from .table import Table
from .trace import Setting

USAGE = f"""Prove that no layout changes the numbers: each against plain PyTorch, in fp64.

    python tools/verify.py [layouts=1x1x1,2x2x2] [zero=0,1] [schedule=gpipe,1f1b]
                           [recompute=none,full] [model=gpt_tiny] [steps=3] [tolerance=1e-12]
                           [suite=quick|full] [part=1/4]

layouts are pp x dp x tp. suite=quick proves the 8 layouts of 1 and 2 twice each, suite=full all of
them under zero 0 and 1, gpipe and 1f1b, recompute none and full. With zero, schedule or recompute
every combination of what is given is proved. part=1/4 is the first of four parts of the work.
model is {", ".join(PRESETS)}, or MODULE:NAME of a parallel3d.verify.Subject of your own.

The columns are errors relative to the largest element of a tensor: loss and norm of every step,
gradient of every parameter, weights after all steps under SGD with momentum and under AdamW
(tolerance: 100 times as much). bits compares everything with the first case of equal dp and tp.

Exit code: 0 all promises are kept, 1 one is not, 2 the arguments are wrong.
"""
EVERY: dict[str, Any] = {
    "zero": [0, 1],
    "schedule": ["gpipe", "1f1b"],
    "recompute": ["none", "full"],
}


class Request(NamedTuple):
    """What the arguments ask for."""

    subject: Subject
    cases: list[Case]
    setting: Setting
    tolerance: float


def main(arguments: Sequence[str]) -> int:
    """Print the table and what breaks a promise; the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    try:
        request = read(arguments)
        return _prove(request)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except RankError as error:
        print(error if not isinstance(error.error, ValueError) else error.error, file=sys.stderr)
        return 2 if isinstance(error.error, ValueError) else 1


def read(arguments: Sequence[str]) -> Request:
    """The arguments, judged; raises ValueError with value, rule and way out."""
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
    values = {key: READERS[key](key, value) for key, value in given.items()}
    cases = _cases(values)
    if "part" in values:
        cases = part(cases, *values["part"])
    setting = Setting(steps=values.get("steps", 3))
    # One more than every microbatch needs: dp ranks and microbatches have unequal shares.
    num_samples = 1 + setting.num_microbatches * max(case.grid.dp for case in cases)
    found = subject(given.get("model", "gpt_tiny"), num_samples)
    return Request(found, cases, setting, values.get("tolerance", 1e-12))


def _prove(request: Request) -> int:
    failed: list[Row] = []
    with Table(len(request.cases)) as table:
        for row in prove(*request):
            table.add(row)
            if not row.passes:
                failed.append(row)
    total = len(request.cases)
    if not failed:
        print(
            f"{total} of {total} cases keep their promises, tolerance {request.tolerance:g} "
            f"({100 * request.tolerance:g} for weights after AdamW)"
        )
        return 0
    first = failed[0]
    print(f"{len(failed)} of {total} cases break a promise; the first, {first.case}:")
    print("\n".join(f"  {failure}" for failure in first.failures))
    return 1


def _cases(values: dict[str, Any]) -> list[Case]:
    layouts = values.get("layouts", list(LAYOUTS))
    choices = {key: values[key] for key in EVERY if key in values}
    if values.get("suite") == "full":
        return product(layouts, **{**EVERY, **choices})
    return product(layouts, **choices) if choices else quick(layouts)


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
    return [int(each) for each in _some_of("0", "1")(key, value)]


def _list(key: str, value: str) -> list[str]:
    found = [each.strip() for each in value.split(",")]
    if not all(found):
        raise ValueError(f"{key}={value} has an empty place: write {key}=A,B")
    return found


def _steps(key: str, value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise ValueError(f"{key}={value}: a number of steps is a whole number from 1 up")
    return int(value)


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
    "schedule": _some_of(*NAMES),
    "recompute": _some_of("none", "full"),
    "model": lambda key, value: value,
    "steps": _steps,
    "tolerance": _tolerance,
    "suite": _one_of("quick", "full"),
    "part": _part,
}
