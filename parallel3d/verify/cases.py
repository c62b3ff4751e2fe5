"""Which layouts are proved, and which of them promise equal bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product as every
from typing import NamedTuple

from ..topology import Grid

LAYOUTS = tuple("1x1x1 2x1x1 1x2x1 1x1x2 2x2x1 2x1x2 1x2x2 2x2x2".split())


class Case(NamedTuple):
    """A layout, and the choices that must not change its numbers."""

    grid: Grid
    zero: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    num_chunks: int | None = None

    def __str__(self) -> str:
        chunks = "" if self.num_chunks is None else f" num_chunks={self.num_chunks}"
        choices = f"zero={self.zero} schedule={self.schedule} recompute={self.recompute}"
        return f"{self.grid} {choices}{chunks}"

    @property
    def family(self) -> tuple[int, int]:
        """Cases of equal dp and tp promise equal bits, at equal microbatches."""
        return self.grid.dp, self.grid.tp


def product(
    layouts: Iterable[str],
    zero: Iterable[int] = (1,),
    schedule: Iterable[str] = ("1f1b",),
    recompute: Iterable[str] = ("none",),
    num_chunks: Iterable[int | None] = (None,),
) -> list[Case]:
    """Every combination."""
    grids = [Grid.parse(layout) for layout in layouts]
    return ordered(Case(*choice) for choice in every(grids, zero, schedule, recompute, num_chunks))


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
    firsts: dict[tuple[int, int], Case] = {}
    for case in cases:
        firsts.setdefault(case.family, case)
    return [c for c in cases if c in mine or (c.family in families and firsts[c.family] == c)]
