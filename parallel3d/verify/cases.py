"""Which layouts are proved, and which of them promise equal bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product as every
from typing import NamedTuple

from ..topology import Grid

LAYOUTS = tuple("1x1x1 2x1x1 1x2x1 1x1x2 2x2x1 2x1x2 1x2x2 2x2x2".split())


Family = tuple[int, int, bool]


class Case(NamedTuple):
    """A layout, and the choices that must not change its numbers.

    ``reduce`` is ``each`` or ``last`` from ZeRO 2 on; below there is no choice, and it is ``last``.
    """

    grid: Grid
    zero: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    num_chunks: int | None = None
    reduce: str = "last"

    def __str__(self) -> str:
        chunks = "" if self.num_chunks is None else f" num_chunks={self.num_chunks}"
        reduce = f" reduce={self.reduce}" if self.zero >= 2 else ""
        choices = f"zero={self.zero}{reduce} schedule={self.schedule} recompute={self.recompute}"
        return f"{self.grid} {choices}{chunks}"

    @property
    def family(self) -> Family:
        """Cases of equal dp and tp promise equal bits, at equal microbatches.

        Sums over dp in each microbatch are others than those once a step.
        """
        return self.grid.dp, self.grid.tp, self.reduce == "each" and self.grid.dp > 1


def product(
    layouts: Iterable[str],
    zero: Iterable[int] = (1,),
    schedule: Iterable[str] = ("1f1b",),
    recompute: Iterable[str] = ("none",),
    num_chunks: Iterable[int | None] = (None,),
    reduce: Iterable[str] = ("each",),
) -> list[Case]:
    """Every combination that differs."""
    grids = [Grid.parse(layout) for layout in layouts]
    combined = every(grids, stages(zero, reduce), schedule, recompute, num_chunks)
    return ordered(
        Case(grid, stage, name, mode, chunks, how)
        for grid, (stage, how), name, mode, chunks in combined
    )


def stages(zero: Iterable[int], reduce: Iterable[str]) -> list[tuple[int, str]]:
    """Of ZeRO, with each way to reduce where there is a choice."""
    both = every(zero, reduce)
    return list(dict.fromkeys((stage, how if stage >= 2 else "last") for stage, how in both))


def ordered(cases: Iterable[Case]) -> list[Case]:
    """By family, then by pp, each once: a world is started once a layout."""
    return sorted(dict.fromkeys(cases), key=lambda case: (case.family, case.grid.pp))


def part(cases: Sequence[Case], index: int, count: int) -> list[Case]:
    """The ``index``-th of ``count`` parts, from 1; with the first of each family that it touches.

    Bits are compared with a family's first, so each part can be proved for itself.
    """
    start, stop = ((len(cases) * at) // count for at in (index - 1, index))
    mine = set(cases[start:stop])
    families = {case.family for case in mine}
    firsts: dict[Family, Case] = {}
    for case in cases:
        firsts.setdefault(case.family, case)
    return [c for c in cases if c in mine or (c.family in families and firsts[c.family] == c)]
