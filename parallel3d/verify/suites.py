"""What is proved: every combination of choices, or few in which any two choices meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..pipeline.schedules import NAMES, build
from ..topology import Grid
from .cases import LAYOUTS, Case, ordered, product, stages
from .covering import pairwise

Work = dict[str, list[Case]]  # by model
SCHEDULES = (*NAMES, "auto")


class Choices(NamedTuple):
    """The values of each dimension that a suite combines."""

    model: Sequence[str] = ("gpt_deep", "gpt_deep_tied")
    layouts: Sequence[str] = (*LAYOUTS, "4x1x1", "4x2x1")
    zero: Sequence[int] = (0, 1, 2, 3)
    schedule: Sequence[str] = SCHEDULES
    recompute: Sequence[str] = ("none", "full", "selective")
    num_chunks: Sequence[int | None] = (None,)
    reduce: Sequence[str] = ("each", "last")

    def __str__(self) -> str:
        told = {name: ", ".join(map(str, values)) for name, values in self._asdict().items()}
        if self.num_chunks == (None,):
            del told["num_chunks"]
        return "\n".join(f"  {name:<10} {values}" for name, values in told.items())


# More chunks than the two that a schedule has by default, in the suite of every combination.
CHUNKED = Choices(
    layouts=("2x1x1", "2x2x1", "2x1x2"), schedule=("interleaved", "looped-bfs"), num_chunks=(3, 4)
)


def full(choices: Choices) -> Work:
    """Every combination, and those of ``CHUNKED`` that are among the choices."""
    work = every(choices)
    if choices.num_chunks == (None,):
        narrow = {
            name: [value for value in getattr(CHUNKED, name) if value in getattr(choices, name)]
            for name in ("layouts", "zero", "schedule", "recompute", "reduce")
        }
        more = product(**narrow, num_chunks=CHUNKED.num_chunks)
        work = {model: ordered([*cases, *more]) for model, cases in work.items()}
    return work


def quick(choices: Choices) -> Work:
    """Few cases: every two choices of two dimensions meet in one."""
    work: Work = {model: [] for model in choices.model}
    zero = stages(choices.zero, choices.reduce)
    order = (choices.model, choices.layouts, zero)
    rest = (choices.schedule, choices.recompute, choices.num_chunks)
    for model, layout, (stage, reduce), schedule, mode, chunks in pairwise(*order, *rest):
        case = Case(Grid.parse(layout), stage, schedule, mode, chunks, reduce)
        work[model].append(case)
    return {model: ordered(cases) for model, cases in work.items()}


def every(choices: Choices) -> Work:
    """Every combination."""
    cases = product(
        choices.layouts,
        choices.zero,
        choices.schedule,
        choices.recompute,
        choices.num_chunks,
        choices.reduce,
    )
    return dict.fromkeys(choices.model, cases)


SUITES: dict[str, Callable[[Choices], Work]] = {"quick": quick, "full": full, "": every}
TOLD = {
    "quick": "every two choices meet of",
    "full": "every combination of",
    "": "every combination of",
}


def describe(suite: str, choices: Choices) -> str:
    """What a suite covers, in words."""
    told = [f"{TOLD[suite]}", str(choices)]
    if suite == "full" and choices.num_chunks == (None,):
        chunked = f"{' and '.join(CHUNKED.schedule)} with 3 and 4 chunks on "
        told.append(f"and of {chunked}{', '.join(CHUNKED.layouts)}")
    return "\n".join(told)


def num_stages(case: Case) -> int:
    """The least that a case cuts a model into; ``auto`` takes as many as there are units for."""
    if case.schedule == "auto":
        return case.grid.pp
    return len(build(case.schedule, case.grid.pp, 1, case.num_chunks).rank_of_stage)
