"""The proof as a command: key=value arguments to an exit code."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..topology import Topology
from .arguments import read_arguments
from .cases import part
from .presets import PRESETS, subject
from .proof import prove
from .ranks import RankError
from .subject import Subject
from .suites import SUITES, Choices, Work, describe, num_stages
from .table import Table
from .trace import Setting

USAGE = f"""Prove that no layout changes the numbers: each against plain PyTorch, in fp64.

    python tools/verify.py [layouts=1x1x1,2x2x2] [zero=0,1] [schedule=gpipe,1f1b] [num_chunks=3]
                           [recompute=none,full] [reduce=each,last] [model=gpt_tiny] [steps=3]
                           [tolerance=1e-12] [suite=quick|full] [part=1/4]

suite=full proves every combination of these, and what is given narrows it:
{Choices()}
interleaved and looped-bfs also with 3 and 4 chunks, on three layouts. suite=quick, the default,
proves as few of them as bring every two choices together. With zero, schedule, num_chunks,
recompute or reduce and no suite, every combination of what is given is proved, else zero=1
schedule=1f1b recompute=none reduce=each. reduce is a choice of ZeRO 2 and 3 alone. part=1/4 is the
first of four parts of the work.

layouts are pp x dp x tp. model is any of
{", ".join(PRESETS)},
or MODULE:NAME of a parallel3d.verify.Subject of your own. Microbatches are uneven: of the steps of
a model of ours every second takes ready ones of unequal sizes and lengths, the others cut a batch
that no layout divides.

The columns are errors relative to the largest element of a tensor: loss and norm of every step,
gradient of every parameter, weights after all steps under SGD with momentum and under AdamW
(tolerance: 100 times as much). bits compares everything with the first case of equal model, dp and
tp: pp, schedule, chunks, recompute and ZeRO promise to change none. ZeRO 2 and 3 that reduce in
each microbatch are a class of their own.

Exit code: 0 all promises are kept, 1 one is not, 2 the arguments are wrong.
"""
UNEVEN = "on microbatches of unequal sizes, in the second step of unequal lengths too"
SINGLE = {"zero": [1], "schedule": ["1f1b"], "recompute": ["none"], "reduce": ["each"]}


class Request(NamedTuple):
    """What the arguments ask for; ``covers`` tells it."""

    subjects: dict[str, Subject]
    work: Work
    setting: Setting
    tolerance: float
    covers: str


def main(arguments: Sequence[str]) -> int:
    """Print the table and what breaks a promise; the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    try:
        return _prove(read(arguments))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except RankError as error:
        print(error if not isinstance(error.error, ValueError) else error.error, file=sys.stderr)
        return 2 if isinstance(error.error, ValueError) else 1


def read(arguments: Sequence[str]) -> Request:
    """The arguments, judged; raises ValueError with value, rule and way out."""
    values = read_arguments(arguments)
    given = {key: values[key] for key in Choices._fields if key in values}
    narrowed = given.keys() & {*SINGLE, "num_chunks"}
    suite = values.get("suite", "" if narrowed else "quick")
    choices = Choices(**(given if suite else {**SINGLE, **given}))
    work, covers = SUITES[suite](choices), [describe(suite, choices)]
    if set(choices.model) <= PRESETS.keys():
        covers.append(UNEVEN)
    setting = Setting(steps=values.get("steps", 3))
    widths = {case.grid.dp for cases in work.values() for case in cases}
    # Each dp rank gets as many ready microbatches; a batch has one sample too many to be even.
    num_microbatches = setting.num_microbatches * math.lcm(*widths)
    subjects = {name: subject(name, num_microbatches + 1) for name in choices.model}
    if suite:
        work, left_out = _fitting(work, subjects)
        covers += left_out
    if "part" in values:
        work = {name: part(cases, *values["part"]) for name, cases in work.items()}
        covers.append("of these part {}/{}".format(*values["part"]))
    return Request(subjects, work, setting, values.get("tolerance", 1e-12), "\n".join(covers))


def _fitting(work: Work, subjects: dict[str, Subject]) -> tuple[Work, list[str]]:
    """The cases that a model has units for, and what is left out, in words."""
    fitting, told = {}, []
    for name, cases in work.items():
        with Topology.init(device="cpu") as topology:
            num_units = len(subjects[name].build(topology))
        fitting[name] = [case for case in cases if num_stages(case) <= num_units]
        if left_out := len(cases) - len(fitting[name]):
            told.append(f"but {left_out} of more stages than {name} has units, {num_units}")
    return fitting, told


def _prove(request: Request) -> int:
    total = sum(map(len, request.work.values()))
    failed: list[str] = []
    print(f"{total} cases: {request.covers}")
    with Table(total) as table:
        for name, cases in request.work.items():
            for row in prove(request.subjects[name], cases, request.setting, request.tolerance):
                table.add(name, row)
                if not row.passes:
                    failures = "".join(f"\n  {failure}" for failure in row.failures)
                    failed.append(f"{row.case} model={name}:{failures}")
    if not failed:
        print(
            f"{total} of {total} cases keep their promises, tolerance {request.tolerance:g} "
            f"({100 * request.tolerance:g} for weights after AdamW)"
        )
        return 0
    print(f"{len(failed)} of {total} cases break a promise; the first, {failed[0]}")
    return 1
